"""A plan's block copies on a stream of their own, beside the computation."""

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.cache.host_pool import HostPool
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine.copies import CheckedCopies, carry_out, trial_copies
from services.gpu_worker.engine.copy_order import CopyOrder
from services.gpu_worker.engine.rates import Rates
from shared.messages import CopyKind

IntArray = npt.NDArray[np.int64]


class CudaCopier:
    """Copies between one KV cache on a GPU and one host pool, in the order given; `Copier` says what the members mean.

    A copy begins when all that was queued before it is computed; a step that depends on it begins when it has ended.
    """

    def __init__(self, cache: KVCache, pool: HostPool, rates: Rates) -> None:
        self._cache = cache
        self._pool = pool
        self._rates = rates
        self._stream = torch.cuda.Stream(cache.data.device)
        self._order = CopyOrder()
        self._timed: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, copies: CheckedCopies) -> float:
        self._collect_rates()
        if copies:
            self._stream.wait_stream(torch.cuda.current_stream(self._cache.data.device))
            with torch.cuda.stream(self._stream):
                for kind, pairs in copies:
                    self._queue(kind, pairs)
        return 0.0

    def before_writes(self, blocks: IntArray) -> None:
        if self._order.holds_up(blocks):
            torch.cuda.current_stream(self._cache.data.device).wait_stream(self._stream)
            self._order.clear()

    def measure(self) -> None:
        for _ in range(2):
            self._timed.clear()  # memory that is touched for the first time is slow
            self.run(trial_copies(self._cache, self._pool))
            self._stream.synchronize()
        self._collect_rates()

    def _queue(self, kind: CopyKind, pairs: IntArray) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        carry_out(kind, pairs, self._cache, self._pool)
        end.record()
        self._order.add(kind, pairs)
        if kind is not CopyKind.WITHIN:
            self._timed.append((len(pairs) * self._cache.bytes_per_block, start, end))

    def _collect_rates(self) -> None:
        """Of the copies that have ended; they end in order."""
        if self._stream.query():
            self._order.clear()
        while self._timed and self._timed[0][2].query():
            num_bytes, start, end = self._timed.pop(0)
            self._rates.record_copy(num_bytes, start.elapsed_time(end) / 1e3)
