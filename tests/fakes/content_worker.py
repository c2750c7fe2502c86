"""A worker without a model that notices every misplaced block.

It carries out plans as infra/protocol.md says, on a paged memory that holds token ids in the place of KV. The next
token of a row is a checksum over its whole context, *read through its block table*: one wrong, shared or overwritten
block changes the text.

Copies move content between that memory and a host memory of the same kind. A block into which nothing was written yet
cannot be copied, nor can the host be read where the same plan puts something.

It is as asynchronous as a worker on a GPU: plans that lay in its inbox when a row ended have been launched with that
row, so they still write through its block table (poison, here). A scheduler that hands such blocks out too early
corrupts somebody's text.
"""

import zlib
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.messages import (
    BeamRow,
    BlockCopies,
    Candidates,
    CopyKind,
    EndReason,
    NewRow,
    StepPlan,
    StepResult,
    Submission,
)
from shared.packing import NO_TOKEN, pack_float32, pack_int32, unpack_int32
from shared.sampling import SamplingParams

EOS_TOKEN = 0
VOCAB_SIZE = 24
"""Small, so that EOS and stop tokens happen often."""
POISON = -7
ROSTER_EVERY = 64
RATES_EVERY = 8
"""Plans between two results that tell measured rates; the first one does, too."""


class ProtocolViolation(AssertionError):
    """The plan cannot be carried out as the protocol says."""


def choose_token(checksum: int, params: SamplingParams, output_index: int) -> int:
    """The token after a context with this checksum, other ones for other choices; ending ones are masked at first."""
    token = (checksum + params.choice) % VOCAB_SIZE
    if output_index < params.min_tokens:
        masked = {EOS_TOKEN, *params.stop_token_ids}
        while token in masked:
            token = (token + 1) % VOCAB_SIZE
    return token


def token_logprob(checksum: int, token: int) -> float:
    """The pretended log-probability of a token after a context; exact as float32, and so are its sums."""
    return -(1 + zlib.crc32(pack_int32([token]), checksum) % 512) / 64


def find_ending(token: int, params: SamplingParams, output_index: int) -> EndReason | None:
    """Whether the output ends with this token."""
    if output_index >= params.min_tokens:
        if token == EOS_TOKEN and not params.ignore_eos:
            return EndReason.EOS
        if token in params.stop_token_ids:
            return EndReason.STOP_TOKEN
    return EndReason.LENGTH if output_index + 1 >= params.max_tokens else None


def reference_output(submission: Submission) -> tuple[list[int], EndReason]:
    """The text that the request would have alone, without pages."""
    output: list[int] = []
    checksum = zlib.crc32(submission.prompt_tokens)
    while True:
        token = choose_token(checksum, submission.params, len(output))
        output.append(token)
        ending = find_ending(token, submission.params, len(output) - 1)
        if ending is not None:
            return output, ending
        checksum = zlib.crc32(pack_int32([token]), checksum)


def reference_logprob(submission: Submission, tokens: Sequence[int]) -> float:
    """The sum of the log-probabilities of an output."""
    total, checksum = 0.0, zlib.crc32(submission.prompt_tokens)
    for token in tokens:
        total += token_logprob(checksum, token)
        checksum = zlib.crc32(pack_int32([token]), checksum)
    return total


class BeamText(NamedTuple):
    """One result of a beam search."""

    tokens: list[int]
    score: float
    reason: EndReason


def rank_candidates(checksum: int, params: SamplingParams, output_index: int) -> list[tuple[int, float]]:
    """What may follow a context, best first: (token, or `-1 - token` if it ends; log-probability)."""
    endings = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS_TOKEN,))}
    masked = endings if output_index < params.min_tokens else set()
    ranked = sorted((-token_logprob(checksum, token), token) for token in range(VOCAB_SIZE) if token not in masked)
    most = max(2 * params.beam_width, params.beam_width + len(endings))
    return [(-1 - token if token in endings else token, -negative) for negative, token in ranked[:most]]


def reference_beams(submission: Submission) -> list[BeamText]:
    """The results that a beam search would have alone: all sequences are lists, and everything is computed anew."""
    params, width = submission.params, submission.params.beam_width
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[BeamText] = []
    while True:
        options = []
        for index, (total, tokens) in enumerate(beams):
            checksum = zlib.crc32(submission.prompt_tokens + pack_int32(tokens))
            for token, logprob in rank_candidates(checksum, params, len(tokens)):
                options.append((-(total + logprob), index, token if token >= 0 else -1 - token, token < 0))
        options.sort()
        length = len(beams[0][1]) + 1
        following: list[tuple[float, list[int]]] = []
        for rank, (negative, index, token, ends) in enumerate(options):
            tokens = [*beams[index][1], token]
            if ends or length == params.max_tokens:
                if rank < width:
                    reason = EndReason.LENGTH if not ends else EndReason.STOP_TOKEN
                    reason = EndReason.EOS if ends and token not in params.stop_token_ids else reason
                    done.append(BeamText(tokens, -negative / length**params.length_penalty, reason))
            elif len(following) < width:
                following.append((-negative, tokens))
        done = sorted(done, key=lambda text: -text.score)[:width]
        if not following or (len(done) == width and following[0][0] / length**params.length_penalty <= done[-1].score):
            return done[: params.num_hypotheses]
        beams = following


@dataclass(slots=True)
class Row:
    """One row of the persistent batch."""

    request_id: str
    tokens: "array[int]"
    num_prompt_tokens: int
    params: SamplingParams
    computed: int
    blocks: list[int] = field(default_factory=list)
    is_decode: bool = False
    is_beam: bool = False
    has_joined: bool = False
    last_launched: int = 0
    """Set when the row ended: plans up to this one were launched with it."""

    @property
    def output_index(self) -> int:
        """Of its next token."""
        return len(self.tokens) - self.num_prompt_tokens


class ContentWorker:
    """One incarnation. `inbox` holds plans that were sent and not carried out."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_tokens: int,
        num_cpu_blocks: int = 0,
        rates: Sequence[tuple[float, ...]] = (),
    ) -> None:
        """`max_tokens` is the most that one pass may compute. `rates` are what it says to have measured, in turn."""
        self.name = name
        self.incarnation = incarnation
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_tokens = max_tokens
        self.num_cpu_blocks = num_cpu_blocks
        self.rates = rates
        self.memory = array("i", [POISON]) * (num_blocks * block_size)
        self.host = array("i", [POISON]) * (num_cpu_blocks * block_size)
        self.num_copied: Counter[CopyKind] = Counter()
        self.rows: dict[int, Row] = {}
        self.ended_rows: dict[int, Row] = {}
        self.inbox: deque[StepPlan] = deque()
        self.last_plan = 0
        self._scheduled: list[int] = []
        self._checksums: dict[int, int] = {}
        self.num_beam_steps = 0
        self.faulty: set[str] = set()
        """Requests that this worker cannot compute: their rows end with an error when they are due."""

    def step(self) -> StepResult:
        """Carry out the oldest plan of the inbox."""
        return self.execute(self.inbox.popleft())

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan."""
        if plan.plan_id != self.last_plan + 1:
            raise ProtocolViolation(f"plan {plan.plan_id} follows {self.last_plan}")
        self.last_plan = plan.plan_id
        left = tuple(row for row in plan.dropped if self._drop(row))
        self._copy_blocks(plan.copies)
        for new in plan.added:
            self._add(new)
        self._make_beams(plan.beams)
        self._append_blocks(plan)
        self._overwrite_ended(plan.plan_id)
        sampled = self._forward(plan)
        return self._publish(plan.plan_id, left, sampled)

    def _drop(self, row: int) -> bool:
        """Whether a row left that readers know of. A row that ended by itself is not here any more."""
        dropped = self.rows.pop(row, None)
        self.ended_rows.pop(row, None)
        return dropped is not None and dropped.has_joined

    def _copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        """OUT, then WITHIN, then IN; within a kind the order must not matter."""
        kinds = [copy.kind for copy in copies]
        pairs = {copy.kind: _pairs(copy) for copy in copies}
        put = {destination for _, destination in pairs.get(CopyKind.OUT, ())}
        if kinds != sorted(pairs) or put & {source for source, _ in pairs.get(CopyKind.IN, ())}:
            raise ProtocolViolation(f"copies in the order {kinds}, or IN reads what OUT puts")
        for kind in kinds:
            self._copy(kind, pairs[kind])

    def _copy(self, kind: CopyKind, pairs: Sequence[tuple[int, int]]) -> None:
        source_memory = self.host if kind is CopyKind.IN else self.memory
        target_memory = self.host if kind is CopyKind.OUT else self.memory
        destinations = {destination for _, destination in pairs}
        sources = {source for source, _ in pairs}
        if len(destinations) < len(pairs) or (source_memory is target_memory and sources & destinations):
            raise ProtocolViolation(f"{kind.name} {pairs}: a block is written twice, or read and written")
        size = self.block_size
        for source, destination in pairs:
            content = source_memory[source * size : (source + 1) * size]
            in_range = min(source, destination) >= 0 and (destination + 1) * size <= len(target_memory)
            if not in_range or len(content) < size or content[0] == POISON:
                raise ProtocolViolation(f"{kind.name} {source} → {destination}: no such block, or nothing is in it")
            target_memory[destination * size : (destination + 1) * size] = content
        self.num_copied[kind] += len(pairs)

    def _add(self, new: NewRow) -> None:
        if new.row in self.rows or not 0 <= new.row < self.max_num_seqs:
            raise ProtocolViolation(f"row {new.row} is not free")
        self.ended_rows.pop(new.row, None)
        tokens = unpack_int32(new.tokens)
        self.rows[new.row] = Row(new.request_id, tokens, new.num_prompt_tokens, new.params, new.num_computed_tokens)

    def _make_beams(self, beams: Sequence[BeamRow]) -> None:
        """Parents are what they were before the plan, whatever becomes of their rows."""
        made = {beam.row: self._heir(beam) for beam in beams}
        for number, row in made.items():
            present = self.rows.get(number)
            if len(made) < len(beams) or (present and (not present.is_beam or present.request_id != row.request_id)):
                raise ProtocolViolation(f"row {number} is not free")
            self.ended_rows.pop(number, None)
        self.rows.update(made)

    def _heir(self, beam: BeamRow) -> Row:
        parent = self.rows.get(beam.parent)
        if parent is None or not parent.is_beam or not 0 <= beam.row < self.max_num_seqs:
            raise ProtocolViolation(f"row {beam.row} from row {beam.parent}")
        blocks = parent.blocks[:] if beam.block == -1 else [*parent.blocks[:-1], beam.block]
        tokens = parent.tokens + array("i", [beam.token])
        heir = Row(parent.request_id, tokens, parent.num_prompt_tokens, parent.params, parent.computed, blocks)
        heir.is_beam = True
        return heir

    def _append_blocks(self, plan: StepPlan) -> None:
        pairs = unpack_int32(plan.blocks)
        for row, block_id in zip(pairs[::2], pairs[1::2], strict=True):
            holder = self.rows.get(row) or self.ended_rows.get(row)
            if holder is None or not 0 <= block_id < self.num_blocks:
                raise ProtocolViolation(f"block {block_id} for row {row}")
            holder.blocks.append(block_id)

    def _overwrite_ended(self, plan_id: int) -> None:
        """What a pass that was launched before the ending was known writes, through the old table."""
        for number, row in list(self.ended_rows.items()):
            if plan_id > row.last_launched:
                del self.ended_rows[number]
            elif row.computed < len(row.blocks) * self.block_size:
                self.memory[self._slot(row, row.computed)] = POISON
                row.computed += 1

    def _forward(self, plan: StepPlan) -> dict[int, int]:
        """Write the KV of everything scheduled, then sample: row → token."""
        chunks = dict(plan.chunks)
        decoding = [number for number, row in self.rows.items() if row.is_decode]
        beams = [beam.row for beam in plan.beams]
        num_tokens = len(decoding) + len(beams) + sum(chunks.values())
        if num_tokens > self.max_tokens or len(chunks) != len(plan.chunks) or min(chunks.values(), default=1) < 1:
            raise ProtocolViolation(f"chunks {plan.chunks} beside {len(decoding)} decode rows")
        sampling = [*decoding, *beams]
        for number in sampling:
            self._write(self.rows[number], 1)
        for number, num_scheduled in chunks.items():
            row = self.rows.get(number)
            if row is None and number in self.ended_rows:
                continue
            if row is None or row.is_decode or row.is_beam:
                raise ProtocolViolation(f"row {number} is not in prefill")
            self._write(row, num_scheduled)
            if row.computed == len(row.tokens):
                sampling.append(number)
        self._scheduled = [*decoding, *beams, *(number for number in chunks if number in self.rows)]
        self.num_beam_steps += len(beams) > 0
        self._checksums = {n: self._checksum(self.rows[n]) for n in sampling if not self._is_faulty(n)}
        return {
            number: choose_token(checksum, self.rows[number].params, self.rows[number].output_index)
            for number, checksum in self._checksums.items()
            if not self.rows[number].params.beam_width
        }

    def _is_faulty(self, number: int) -> bool:
        return self.rows[number].request_id in self.faulty

    def _write(self, row: Row, num_tokens: int) -> None:
        if row.computed + num_tokens > len(row.tokens):
            raise ProtocolViolation(f"{num_tokens} tokens from {row.computed} on, but {len(row.tokens)} are known")
        if row.computed + num_tokens > len(row.blocks) * self.block_size:
            raise ProtocolViolation(f"{row.request_id} has {len(row.blocks)} blocks")
        for position in range(row.computed, row.computed + num_tokens):
            self.memory[self._slot(row, position)] = row.tokens[position]
        row.computed += num_tokens

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def block(self, block_id: int) -> bytes:
        """What a block holds now, packed."""
        return pack_int32(self.memory[block_id * self.block_size : (block_id + 1) * self.block_size])

    def will_hold(self, place: int) -> bytes:
        """What a block (of the host pool: `~block`) holds when the inbox has been copied, if none of it writes it."""
        for plan in reversed(self.inbox):
            for copy in reversed(plan.copies):
                into = {destination: source for source, destination in _pairs(copy)}
                if (copy.kind is CopyKind.OUT) == (place < 0):
                    number = ~place if place < 0 else place
                    source = into.get(number, number)
                    from_host = copy.kind is CopyKind.IN if number in into else place < 0
                    place = ~source if from_host else source
        return self.block(place) if place >= 0 else self.host_block(~place)

    def host_block(self, block_id: int) -> bytes:
        """What a block of the host pool holds now, packed."""
        return pack_int32(self.host[block_id * self.block_size : (block_id + 1) * self.block_size])

    def _checksum(self, row: Row) -> int:
        """Of everything in front of the row's next token, as its blocks hold it."""
        checksum = 0
        for index, block_id in enumerate(row.blocks):
            held = min(self.block_size, row.computed - index * self.block_size)
            if held > 0:
                start = block_id * self.block_size
                checksum = zlib.crc32(pack_int32(self.memory[start : start + held]), checksum)
        return checksum

    def _publish(self, plan_id: int, left: Sequence[int], sampled: dict[int, int]) -> StepResult:
        tokens = array("i", [NO_TOKEN]) * (max(sampled, default=-1) + 1)
        joined, ended, logprobs = [], [], []
        for number, token in sorted(sampled.items()):
            row = self.rows[number]
            tokens[number] = token
            if not row.has_joined:
                joined.append((number, row.request_id, row.output_index))
            if row.params.with_logprobs:
                logprobs.append((number, token_logprob(self._checksums[number], token)))
            ending = find_ending(token, row.params, row.output_index)
            row.tokens.append(token)
            row.is_decode = row.has_joined = True
            if ending is not None:
                ended.append((number, int(ending)))
                self._leave(number)
        candidates = self._find_candidates()
        for number in [number for number in self._scheduled if number in self.rows and self._is_faulty(number)]:
            ended.append((number, int(EndReason.ERROR)))
            self._leave(number)
        return StepResult(
            worker=self.name,
            incarnation=self.incarnation,
            step_id=plan_id,
            tokens=pack_int32(tokens),
            joined=tuple(joined),
            left=tuple(left),
            ended=tuple(ended),
            roster=tuple(self._roster()) if plan_id % ROSTER_EVERY == 0 else (),
            logprobs=tuple(logprobs),
            candidates=candidates,
            rates=self._measured(plan_id),
        )

    def _find_candidates(self) -> tuple[Candidates, ...]:
        found = []
        for number, checksum in sorted(self._checksums.items()):
            row = self.rows.get(number)
            if row is not None and row.params.beam_width:
                row.is_beam = True
                tokens, values = zip(*rank_candidates(checksum, row.params, row.output_index), strict=True)
                found.append(Candidates(number, pack_int32(tokens), pack_float32(values)))
        return tuple(found)

    def _measured(self, plan_id: int) -> tuple[float, ...]:
        turn, rest = divmod(plan_id - 1, RATES_EVERY)
        return self.rates[turn % len(self.rates)] if self.rates and not rest else ()

    def _leave(self, number: int) -> None:
        row = self.rows.pop(number)
        if self.inbox and not row.is_beam:  # plans made ahead do not name beams
            row.last_launched = self.inbox[-1].plan_id
            self.ended_rows[number] = row

    def _roster(self) -> Iterator[tuple[int, str, int]]:
        return ((number, row.request_id, row.output_index) for number, row in self.rows.items() if row.has_joined)


def _pairs(copy: BlockCopies) -> list[tuple[int, int]]:
    numbers = unpack_int32(copy.pairs)
    return list(zip(numbers[::2], numbers[1::2], strict=True))
