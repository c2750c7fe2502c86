"""Carries out a plan's block copies and measures how fast the host pool is."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kernels.block_copy.api import copy_blocks
from services.gpu_worker.cache.host_pool import HostPool
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine.rates import Rates
from shared.messages import CopyKind

IntArray = npt.NDArray[np.int64]
CheckedCopies = Sequence[tuple[CopyKind, IntArray]]
"""Kinds and pairs [n, 2] of a plan, unpacked and checked (copy_validation.py)."""

_TRIAL_BLOCKS = 8
"""Copied at warm-up: a few megabytes, a few milliseconds."""


class Copier(Protocol):
    """Copies between one KV cache and one host pool, in the order given."""

    def run(self, copies: CheckedCopies) -> float:
        """Carry out the copies, or queue them; the seconds that the step was held up."""

    def before_writes(self, blocks: IntArray) -> None:
        """A step is about to read the cache and to write to these blocks: what it depends on comes first."""

    def measure(self) -> None:
        """Learn the rate from a trial, if there is a host pool. Overwrites blocks of the cache and of the pool."""


class BlockingCopier:
    """In main memory: a copy has ended when the call returns."""

    def __init__(self, cache: KVCache, pool: HostPool, rates: Rates, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._pool = pool
        self._rates = rates
        self._clock = clock

    def run(self, copies: CheckedCopies) -> float:
        return sum(self._copy(kind, pairs) for kind, pairs in copies)

    def before_writes(self, blocks: IntArray) -> None:
        """Nothing is on its way."""

    def measure(self) -> None:
        trial = trial_copies(self._cache, self._pool)
        for kind, pairs in trial:
            carry_out(kind, pairs, self._cache, self._pool)  # memory that is touched for the first time is slow
        self.run(trial)

    def _copy(self, kind: CopyKind, pairs: IntArray) -> float:
        started = self._clock()
        carry_out(kind, pairs, self._cache, self._pool)
        seconds = self._clock() - started
        if kind is not CopyKind.WITHIN:
            self._rates.record_copy(len(pairs) * self._cache.bytes_per_block, seconds)
        return seconds


def carry_out(kind: CopyKind, pairs: IntArray, cache: KVCache, pool: HostPool) -> None:
    """Copy blocks; a GPU's copies are queued on the current stream."""
    match kind:
        case CopyKind.OUT:
            pool.store(cache, pairs)
        case CopyKind.WITHIN:
            copy_blocks(cache.data, cache.data, pairs)
        case CopyKind.IN:
            pool.load(cache, pairs)


def trial_copies(cache: KVCache, pool: HostPool) -> CheckedCopies:
    """A few blocks out and back in."""
    count = min(_TRIAL_BLOCKS, pool.num_blocks, cache.num_blocks)
    trial = np.repeat(np.arange(count, dtype=np.int64)[:, None], 2, 1)
    return (CopyKind.OUT, trial), (CopyKind.IN, trial)
