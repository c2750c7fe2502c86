"""A hand-driven scheduler for engine tests: hands out blocks, makes plans, reads results as readers of the log do."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.gpu_worker.engine import Engine
from shared.messages import EndReason, NewRow, StepPlan, StepResult, Tick
from shared.packing import NO_TOKEN, pack_int32, unpack_int32
from shared.sampling import SamplingParams

_TICK = Tick(0, "0-0", "0-0", 0.0)


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
    num_hits: int = 0
    """Blocks at the front of its table that another request computed."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


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

        `hits` are blocks that hold the beginning of its tokens already; whoever owns them keeps them.
        """
        request = self.requests.setdefault(request_id, Driven(request_id, list(prompt), params))
        request.row = self._rows.index(None) if row is None else row
        request.num_computed, request.pending = len(hits) * self.engine.cache.block_size, True
        request.blocks, request.num_hits = list(hits), len(hits)
        self._rows[request.row] = request
        tokens = pack_int32(request.tokens)
        self._added.append(NewRow(request.row, request_id, tokens, len(request.prompt), request.num_computed, params))
        return request

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
        dropped = (*drop_rows, *(self._release(self.requests[request_id]) for request_id in drop))
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
        )
        self._added = []
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
            block = self._free.pop()
            request.blocks.append(block)
            pairs += [self._row_of(request.request_id), block]
        return pairs

    def _release(self, request: Driven) -> int:
        row = self._row_of(request.request_id)
        self._free += request.blocks[request.num_hits :]
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
        for row, reason in result.ended:
            request = self._readers.pop(row)
            request.end = EndReason(reason)
            self._release(request)
        return result
