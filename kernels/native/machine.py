"""What this machine can do at most, measured: the yardstick of benchmarks. Uses the threads of the current library."""

import time
from collections.abc import Callable
from enum import IntEnum

import torch

from kernels.native.library import Float, Int, Library, Pointer
from kernels.native.memory import allocate


class Product(IntEnum):
    """Kinds of multiply-add."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


def peak_operations(library: Library, product: Product, *, seconds: float = 0.2) -> float:
    """Operations (two per multiply-add) a second from registers, on all threads together; 0 if the level has no
    instruction for it."""
    sink = torch.empty(16 * 8 * library.num_threads)
    run = library.function("pw_multiply_in_registers", Int, Int, Pointer, result=Int)
    count = int(run(product, 1000, sink.data_ptr()))
    return 2 * count * _rate(lambda: run(product, 1000, sink.data_ptr()), seconds) if count else 0.0


def read_bandwidth(library: Library, *, num_bytes: int = 512 << 20, seconds: float = 0.5) -> float:
    """Bytes a second read from memory larger than the caches, on all threads together."""
    data, sink = allocate(num_bytes), torch.zeros(1)
    data.fill_(1)
    run = library.function("pw_read_memory", Pointer, Int, Pointer, result=Float)
    return num_bytes * _rate(lambda: run(data.data_ptr(), num_bytes, sink.data_ptr()), seconds)


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Calls a second: the best of as many as fit the time."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return 1 / best
