"""A hand-driven scheduler for engine tests: hands out blocks, makes plans, reads results as readers of the log do."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.gpu_worker.engine import Engine
from shared.messages import BlockCopies, CopyKind, EndReason, NewRow, StepPlan, StepResult, Tick
from shared.packing import NO_TOKEN, pack_int32, unpack_int32
from shared.sampling import SamplingParams

_TICK = Tick(0, "0-0", "0-0", 0.0)


def owns_blocks(engine: Engine, row: int) -> bool:
    """Whether a row of the engine's batch holds KV blocks."""
    return bool(engine._batch.tables.num_blocks[row])


@dataclass(slots=True)
class Driven:
    """One request and what the results said of it."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    end: EndReason | None = None
    row: int | None = None
    num_computed: int = 0
    pending: bool = True
    """Whether a chunk is still due before it decodes."""
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    """Where its KV waits while it is swapped out."""
    logprobs: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_written(self) -> int:
        """Tokens whose KV is in its blocks."""
        return self.num_computed if self.pending else len(self.tokens) - 1


class EngineDriver:
    """Runs requests on an engine. Blocks are handed out in a shuffled order, so tables are never contiguous."""

    def __init__(self, engine: Engine, *, seed: int = 0, worker: str = "worker-0", incarnation: int = 1) -> None:
        self.engine = engine
        self.requests: dict[str, Driven] = {}
        self.results: list[StepResult] = []
        self._plan_id = 0
        self._rows: list[Driven | None] = [None] * engine.config.max_num_seqs
        self._readers: dict[int, Driven] = {}
        self._free = list(range(engine.cache.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._users: Counter[int] = Counter()
        self._free_host = list(range(engine.pool.num_blocks))
        random.Random(seed).shuffle(self._free_host)
        self._copies: dict[CopyKind, list[tuple[int, int]]] = {}
        self._leaving: list[Driven] = []
        self._added: list[NewRow] = []
        self.extra_blocks: list[tuple[int, int]] = []
        """(row, block_id) pairs that the next plan brings on top, as one made before an ending was known would."""
        engine.begin(worker, incarnation)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        row: int | None = None,
        hits: Sequence[int] = (),
    ) -> Driven:
        """The request enters with the next plan; a known one returns with its output.

        `hits` are blocks that hold the beginning of its tokens already; they are shared.
        """
        request = self.requests.setdefault(request_id, Driven(request_id, list(prompt), params))
        return self._enter(request, row, self._share(hits), len(hits) * self.engine.cache.block_size)

    def swap_out(self, request_id: str) -> Driven:
        """The next plan drops the request and copies what is written of it to the host pool."""
        request = self.requests[request_id]
        written = request.blocks[: -(-request.num_written // self.engine.cache.block_size)]
        request.num_computed = request.num_written
        request.host_blocks = [self._free_host.pop() for _ in written]
        self._copy(CopyKind.OUT, written, request.host_blocks)
        self._leaving.append(request)
        return request

    def swap_in(self, request_id: str, *, row: int | None = None) -> Driven:
        """It enters again with the next plan, which copies its blocks back; what is left is prefilled."""
        request = self.requests[request_id]
        blocks = [self._take() for _ in request.host_blocks]
        self._copy(CopyKind.IN, request.host_blocks, blocks)
        return self._enter(request, row, blocks, request.num_computed)

    def fork(self, request_id: str, parent_id: str, params: SamplingParams, *, row: int | None = None) -> Driven:
        """A request enters that has the parent's tokens so far: full blocks are shared, a part of one is copied."""
        parent = self.requests[parent_id]
        child = Driven(request_id, parent.prompt, params, output=list(parent.output))
        self.requests[request_id] = child
        written = parent.num_written
        full = written // self.engine.cache.block_size
        blocks = self._share(parent.blocks[:full])
        if written % self.engine.cache.block_size:
            blocks.append(self._take())
            self._copy(CopyKind.WITHIN, [parent.blocks[full]], [blocks[-1]])
        return self._enter(child, row, blocks, written)

    def _enter(self, request: Driven, row: int | None, blocks: list[int], num_computed: int) -> Driven:
        request.row = self._rows.index(None) if row is None else row
        request.num_computed, request.pending = num_computed, True
        request.blocks = blocks
        self._rows[request.row] = request
        tokens = pack_int32(request.tokens)
        self._added.append(
            NewRow(request.row, request.request_id, tokens, len(request.prompt), num_computed, request.params)
        )
        return request

    def _copy(self, kind: CopyKind, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._copies.setdefault(kind, []).extend(zip(sources, destinations, strict=True))

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] += 1
        return block

    def _share(self, blocks: Sequence[int]) -> list[int]:
        self._users.update(blocks)
        return list(blocks)

    def step(
        self,
        chunks: Mapping[str, int] | None = None,
        *,
        chunk_size: int = 10**9,
        drop: Sequence[str] = (),
        drop_rows: Sequence[int] = (),
    ) -> StepResult:
        """One plan: drop, then `chunks`, or for every request in prefill one of at most `chunk_size`.

        `drop_rows` names rows that may have ended already, as a plan made before that was known does.
        """
        leaving = [*self._leaving, *(self.requests[request_id] for request_id in drop)]
        dropped = (*drop_rows, *(self._release(request) for request in leaving))
        if chunks is None:
            waiting = [r for r in self._rows if r is not None and r.pending]
            sizes = {r.request_id: min(chunk_size, len(r.tokens) - r.num_computed) for r in waiting}
        else:
            sizes = dict(chunks)
        pairs = [number for pair in self.extra_blocks for number in pair]
        self.extra_blocks = []
        for request in self._rows:
            if request is not None:
                pairs += self._grow(request, sizes.get(request.request_id, 0))
        self._plan_id += 1
        plan = StepPlan(
            self._plan_id,
            _TICK,
            dropped=dropped,
            added=tuple(self._added),
            blocks=pack_int32(pairs),
            chunks=tuple((self._row_of(request_id), size) for request_id, size in sizes.items()),
            copies=tuple(
                BlockCopies(kind, pack_int32(number for pair in self._copies[kind] for number in pair))
                for kind in sorted(self._copies)
            ),
        )
        self._free_host += [host for host, _ in self._copies.get(CopyKind.IN, ())]
        self._added, self._leaving, self._copies = [], [], {}
        for request_id, size in sizes.items():
            request = self.requests[request_id]
            request.num_computed += size
            request.pending = request.num_computed < len(request.tokens)
        return self._read(self.engine.step(plan))

    def run(self, *, chunk_size: int = 10**9, max_steps: int = 2000) -> dict[str, list[int]]:
        """Step until every request in a row has ended; answers the outputs of all requests."""
        for _ in range(max_steps):
            if all(request is None for request in self._rows):
                return {request_id: request.output for request_id, request in self.requests.items()}
            self.step(chunk_size=chunk_size)
        raise AssertionError("the requests do not end")

    def _row_of(self, request_id: str) -> int:
        row = self.requests[request_id].row
        assert row is not None
        return row

    def _grow(self, request: Driven, chunk: int) -> list[int]:
        needed = request.num_computed + chunk if request.pending else len(request.tokens)
        pairs: list[int] = []
        if any(new.request_id == request.request_id for new in self._added):
            pairs += [number for block in request.blocks for number in (self._row_of(request.request_id), block)]
        while len(request.blocks) * self.engine.cache.block_size < needed:
            block = self._take()
            request.blocks.append(block)
            pairs += [self._row_of(request.request_id), block]
        return pairs

    def _release(self, request: Driven) -> int:
        row = self._row_of(request.request_id)
        self._users.subtract(request.blocks)
        self._free += [block for block in request.blocks if not self._users[block]]
        request.blocks = []
        request.row = None
        self._rows[row] = None
        return row

    def _read(self, result: StepResult) -> StepResult:
        self.results.append(result)
        for row in result.left:
            del self._readers[row]
        for row, request_id, index in result.joined:
            self._readers[row] = self.requests[request_id]
            assert index == len(self.requests[request_id].output), "output index must be the committed count"
        for row, token in enumerate(unpack_int32(result.tokens)):
            if token != NO_TOKEN:
                self._readers[row].output.append(token)
        for row, logprob in result.logprobs:
            self._readers[row].logprobs.append(logprob)
        for row, reason in result.ended:
            request = self._readers.pop(row)
            request.end = EndReason(reason)
            self._release(request)
        return result
