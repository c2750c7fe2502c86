"""The limits of this machine with all of its cores, measured whenever they are asked for."""

import time
from collections.abc import Callable
from functools import partial

from benchmarks.kernels.timing import Limit, Probe
from benchmarks.machine import Machine
from kernels.native.library import Float, Int, Pointer, current
from kernels.native.machine import Product, peak_operations
from kernels.native.memory import allocate

READ_BYTES = 256 << 20
"""Far more than any cache holds."""
PEAK_S = 0.01
REPEATS = 7
PRODUCTS = {Limit.BF16: Product.BFLOAT16, Limit.INT8: Product.INT8}


class Limits:
    """Yardsticks at hand.

    Raises:
        RuntimeError: no C++ kernels are built for this machine.
    """

    def __init__(self) -> None:
        library = current()
        if library is None:
            raise RuntimeError("the limits of the machine need the C++ kernels: python -m kernels.native.build")
        self._library = library
        self._memory, self._sink = allocate(READ_BYTES).fill_(1), allocate(64)
        self._read_memory = library.function("pw_read_memory", Pointer, Int, Pointer, result=Float)
        self.level = library.level.name

    def probe(self, limit: Limit) -> Probe:
        """Measures one limit, once a call."""
        return self.read if limit is Limit.READ else partial(self.peak, limit)

    def read(self) -> float:
        """Bytes per second."""
        return READ_BYTES / seconds_of(
            lambda: self._read_memory(self._memory.data_ptr(), READ_BYTES, self._sink.data_ptr())
        )

    def peak(self, limit: Limit) -> float:
        """Operations per second, of float32 products if the machine has no instruction for the others."""
        found = peak_operations(self._library, PRODUCTS[limit], seconds=PEAK_S)
        return found or peak_operations(self._library, Product.FLOAT32, seconds=PEAK_S)


def measure_machine() -> Machine:
    """Best of several tries of each limit: other programs only make it look slower."""
    limits = Limits()
    best = {limit: max(limits.probe(limit)() for _ in range(REPEATS)) for limit in Limit}
    return Machine(best[Limit.READ], best[Limit.BF16], best[Limit.INT8])


def seconds_of(call: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
