"""A small beam search around an engine: chooses as Transformers' `generate(num_beams=…, early_stopping=False)` does.

Rows and blocks are handed out at random: a survivor may sit in any free row or any row of the search, so parents are
overwritten, dropped and kept in all combinations.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.gpu_worker.engine import Engine
from shared.messages import BeamRow, BlockCopies, Candidates, CopyKind, NewRow, StepPlan, StepResult, Tick
from shared.packing import pack_int32
from shared.sampling import SamplingParams

_TICK = Tick(0, "0-0", "0-0", 0.0)


@dataclass(slots=True)
class Beam:
    """A running sequence."""

    row: int
    output: list[int] = field(default_factory=list)
    score: np.float32 = field(default_factory=np.float32)
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Found:
    """A finished sequence."""

    score: float
    output: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """A sequence and a token that may follow it."""

    score: np.float32
    beam: Beam
    token: int
    is_ending: bool


class BeamSearch:
    """One search on an engine whose other rows belong to nobody."""

    def __init__(self, engine: Engine, prompt: Sequence[int], params: SamplingParams, *, seed: int = 0) -> None:
        self.engine = engine
        self.prompt = list(prompt)
        self.params = params
        self.found: list[Found] = []
        self.results: list[StepResult] = []
        self.num_forks = 0
        self._draw = random.Random(seed)
        self._free = list(range(engine.cache.num_blocks))
        self._draw.shuffle(self._free)
        self._users: Counter[int] = Counter()
        self._plan_id = 0
        engine.begin("worker-0", 1)

    def run(self, *, chunk_size: int = 10**9) -> list[Found]:
        """The best `beam_width` sequences, best first."""
        beams, candidates = self._prefill(chunk_size)
        while True:
            steps = self._expand(beams, candidates)
            last = len(beams[0].output) + 1 == self.params.max_tokens
            self._finish(steps[: self.params.beam_width], last)
            going = [step for step in steps if not step.is_ending][: self.params.beam_width]
            if last or not self._may_improve(going[0].score, len(beams[0].output) + 1):
                self._run(StepPlan(self._next(), _TICK, dropped=tuple(beam.row for beam in beams)))
                return self.found
            beams, candidates = self._advance(beams, going)

    def _prefill(self, chunk_size: int) -> tuple[list[Beam], dict[int, Candidates]]:
        row = self._draw.randrange(self.engine.config.max_num_seqs)
        count = -(-len(self.prompt) // self.engine.cache.block_size)
        beam = Beam(row, blocks=[self._take() for _ in range(count)])
        new = NewRow(row, "beams", pack_int32(self.prompt), len(self.prompt), 0, self.params)
        pairs = pack_int32(number for block in beam.blocks for number in (row, block))
        self._run(StepPlan(self._next(), _TICK, added=(new,), blocks=pairs))
        for start in range(0, len(self.prompt), chunk_size):
            assert not self.results[-1].candidates
            size = min(chunk_size, len(self.prompt) - start)
            self._run(StepPlan(self._next(), _TICK, chunks=((row, size),)))
        return [beam], {found.row: found for found in self.results[-1].candidates}

    def _expand(self, beams: list[Beam], candidates: dict[int, Candidates]) -> list[Step]:
        """All candidates, best first; as many as Transformers looks at."""
        steps = []
        for beam in beams:
            found = candidates[beam.row]
            tokens, logprobs = np.frombuffer(found.tokens, "<i4"), np.frombuffer(found.logprobs, "<f4")
            for token, logprob in zip(tokens.tolist(), logprobs, strict=True):
                plain = -1 - token if token < 0 else token
                steps.append(Step(np.float32(beam.score + logprob), beam, plain, token < 0))
        return sorted(steps, key=lambda step: -step.score)

    def _finish(self, best: list[Step], last: bool) -> None:
        for step in best:
            if step.is_ending or last:
                output = [*step.beam.output, step.token]
                self.found.append(Found(float(step.score) / len(output) ** self.params.length_penalty, output))
        self.found = sorted(self.found, key=lambda found: -found.score)[: self.params.beam_width]

    def _may_improve(self, best_running: np.float32, length: int) -> bool:
        if len(self.found) < self.params.beam_width:
            return True
        return float(best_running) / length**self.params.length_penalty > self.found[-1].score

    def _advance(self, beams: list[Beam], going: list[Step]) -> tuple[list[Beam], dict[int, Candidates]]:
        held = {beam.row for beam in beams}
        rows = self._draw.sample(range(self.engine.config.max_num_seqs), len(going))
        inside = (len(self.prompt) + len(beams[0].output)) % self.engine.cache.block_size != 0
        kept: set[int] = set()
        survivors, named, pairs, copies = [], [], [], []
        for row, step in zip(rows, going, strict=True):
            blocks, block = list(step.beam.blocks), -1
            if inside and step.beam.row in kept:  # a sibling writes to the last block already
                block = self._take()
                copies += [blocks[-1], block]
                blocks = [*self._share(blocks[:-1]), block]
                self.num_forks += 1
            else:
                self._share(blocks)
                kept.add(step.beam.row)
            if not inside:
                blocks.append(self._take())
                pairs += [row, blocks[-1]]
            survivors.append(Beam(row, [*step.beam.output, step.token], step.score, blocks))
            named.append(BeamRow(row, step.beam.row, step.token, block))
        for beam in beams:
            self._give_back(beam.blocks)
        plan = StepPlan(
            self._next(),
            _TICK,
            dropped=tuple(sorted(held - set(rows))),
            blocks=pack_int32(pairs),
            beams=tuple(named),
            copies=(BlockCopies(CopyKind.WITHIN, pack_int32(copies)),) if copies else (),
        )
        result = self._run(plan)
        assert [found.row for found in result.candidates] == rows
        return survivors, {found.row: found for found in result.candidates}

    def _run(self, plan: StepPlan) -> StepResult:
        result = self.engine.step(plan)
        assert (result.tokens, result.joined, result.left, result.ended, result.roster) == (b"", (), (), (), ())
        self.results.append(result)
        return result

    def _next(self) -> int:
        self._plan_id += 1
        return self._plan_id

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] += 1
        return block

    def _share(self, blocks: list[int]) -> list[int]:
        self._users.update(blocks)
        return blocks

    def _give_back(self, blocks: list[int]) -> None:
        self._users.subtract(blocks)
        self._free += [block for block in blocks if not self._users[block]]
