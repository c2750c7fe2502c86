"""Carries out a plan's block copies and measures how fast the host pool is."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

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


class Copier:
    """Copies between one KV cache and one host pool, in the order given."""

    def __init__(self, cache: KVCache, pool: HostPool, rates: Rates, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._pool = pool
        self._rates = rates
        self._clock = clock

    def run(self, copies: CheckedCopies) -> float:
        """Carry out the copies; the seconds that it took."""
        return sum(self._copy(kind, pairs) for kind, pairs in copies)

    def measure(self) -> None:
        """Learn the rate from a trial, if there is a host pool. Overwrites blocks of the cache and of the pool."""
        count = min(_TRIAL_BLOCKS, self._pool.num_blocks, self._cache.num_blocks)
        trial = np.repeat(np.arange(count, dtype=np.int64)[:, None], 2, 1)
        self._pool.store(self._cache, trial)  # memory that is touched for the first time is slow
        self._pool.load(self._cache, trial)
        self._wait()
        self.run(((CopyKind.OUT, trial), (CopyKind.IN, trial)))

    def _copy(self, kind: CopyKind, pairs: IntArray) -> float:
        started = self._clock()
        match kind:
            case CopyKind.OUT:
                self._pool.store(self._cache, pairs)
            case CopyKind.WITHIN:
                copy_blocks(self._cache.data, self._cache.data, pairs)
            case CopyKind.IN:
                self._pool.load(self._cache, pairs)
        self._wait()
        seconds = self._clock() - started
        if kind is not CopyKind.WITHIN:
            self._rates.record_copy(len(pairs) * self._cache.bytes_per_block, seconds)
        return seconds

    def _wait(self) -> None:
        """A GPU's copies are only queued so far: without this the rate would be that of queueing."""
        if self._cache.data.device.type == "cuda":
            torch.cuda.synchronize(self._cache.data.device)
