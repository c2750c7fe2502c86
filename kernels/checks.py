"""Argument checks that every kernel entry shares."""

import torch


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds: a kernel never runs on shapes it was not written for."""
    if not condition:
        raise ValueError(message)


def same_place(*tensors: torch.Tensor) -> bool:
    """Whether all tensors have one dtype and one device."""
    first = tensors[0]
    return all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
