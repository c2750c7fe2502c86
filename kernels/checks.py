"""Argument checks that every kernel entry shares."""

import torch

from kernels.native.library import Library, current


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds: a kernel never runs on shapes it was not written for."""
    if not condition:
        raise ValueError(message)


def same_place(*tensors: torch.Tensor) -> bool:
    """Whether all tensors have one dtype and one device."""
    first = tensors[0]
    return all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)


def library_for(x: torch.Tensor) -> Library | None:
    """The C++ kernels if they take this tensor: contiguous float32 or bfloat16 in main memory."""
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and x.is_contiguous()
    return current() if fits else None


def library_of_packed(operation: str) -> Library:
    """The C++ kernels, without which a packed cache cannot be read.

    Raises:
        ValueError: there are none.
    """
    library = current()
    if library is None:
        raise ValueError(f"{operation}: a packed cache needs the C++ kernels")
    return library
