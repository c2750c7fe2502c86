"""The C++ kernels of the best dispatch level that is built and that this CPU runs.

An operation asks `current()` for the library, and computes with its torch reference if there is none. Functions take
plain pointers and numbers; ctypes releases the GIL while they run. A fault in their arguments is a crash, so every
operation checks shapes and dtypes before it calls.
"""

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kernels.native.build import library_path
from kernels.native.levels import Level, usable_levels

Pointer = ctypes.c_void_p
Int = ctypes.c_int64
Float = ctypes.c_float


MISSING = "no C++ kernels for this machine: torch computes, several times slower (python -m kernels.native.build)"


class NativeKernelsMissing(RuntimeWarning):
    """No library fits this machine: computing with torch alone is several times slower."""


class FewerThreads(RuntimeWarning):
    """The system did not give as many threads as were asked for."""


class Library:
    """One loaded library."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._loaded = ctypes.CDLL(str(library_path(level)))
        self._functions: dict[str, Callable[..., Any]] = {}
        self.set_num_threads(_num_cores())

    def function(self, name: str, *arguments: type, result: type | None = None) -> Callable[..., Any]:
        """The C function `name`; `arguments` are its types, the same at every call."""
        found = self._functions.get(name)
        if found is None:
            declared = getattr(self._loaded, name)
            declared.argtypes, declared.restype = arguments, result
            found = self._functions[name] = declared
        return found

    @property
    def num_threads(self) -> int:
        """Threads that share the work of a call, the caller included."""
        return int(self.function("pw_num_threads", result=ctypes.c_int)())

    @property
    def takes_bfloat16(self) -> bool:
        """Whether products take bfloat16 activations: the level has an instruction for them."""
        return bool(self.function("pw_linear_takes_bf16", result=Int)())

    def set_num_threads(self, number: int) -> None:
        """Threads started by this inherit the calling thread's cores and niceness. If the system gives fewer, those
        compute, and a warning says so."""
        self.function("pw_set_num_threads", ctypes.c_int)(max(1, number))
        if self.num_threads < number:
            message = f"the system gave {self.num_threads} of {number} threads: steps take longer"
            warnings.warn(message, FewerThreads, stacklevel=2)


_chosen: list[str | None] = []
"""What `using` says, innermost last."""


def current() -> Library | None:
    """The library to compute with, or None for the torch references. The first call without one warns."""
    if not _chosen:
        return _best()
    return None if _chosen[-1] is None else open_library(_chosen[-1])


def level_name() -> str:
    """Name of the current level, or `torch`: part of the numerics fingerprint."""
    library = current()
    return "torch" if library is None else library.level.name


def built_levels() -> tuple[Level, ...]:
    """Levels that are built and that this CPU runs, best first."""
    return tuple(level for level in usable_levels() if library_path(level).exists())


@functools.cache
def open_library(name: str) -> Library:
    """The library of one level.

    Raises:
        ValueError: it is not built, or this CPU does not run it.
    """
    for level in built_levels():
        if level.name == name:
            return Library(level)
    raise ValueError(f"no kernels for level {name!r} here; there are: {[level.name for level in built_levels()]}")


@contextmanager
def using(name: str | None) -> Iterator[Library | None]:
    """Compute with one level, or with the torch references (None), while the block runs. Not for several threads."""
    _chosen.append(name)
    try:
        yield current()
    finally:
        _chosen.pop()


@functools.cache
def _best() -> Library | None:
    for level in built_levels():
        try:
            return open_library(level.name)
        except (OSError, AttributeError) as error:  # a damaged file, or one that this system cannot load
            message = f"kernels of level {level.name} cannot be loaded: {error}"
            warnings.warn(message, NativeKernelsMissing, stacklevel=3)
    warnings.warn(MISSING, NativeKernelsMissing, stacklevel=3)
    return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
