"""From the real engine: blocks of sequences with one prompt, and those that are copied when one of them parts."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.kv_cache.in_process import BLOCK_SIZE, make_engine, seats_of, serve
from benchmarks.report import Value
from services.gpu_worker.models.model import Model
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import CopyKind, StepPlan, Submission
from shared.packing import pack_int32
from shared.records import choice_id
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of one prompt."""

    name: str
    submissions: list[Submission]
    num_sequences: int


@dataclass(slots=True)
class Blocks:
    """Of a run, when the most were in use."""

    num_in_tables: int = 0
    """As if every table had its own."""
    num_used: int = 0
    num_copied: int = 0
    """Until the end."""

    def before(self, core: SchedulerCore, plan: StepPlan) -> None:
        self.num_copied += sum(len(copies.pairs) // 8 for copies in plan.copies if copies.kind == CopyKind.WITHIN)
        tables = list(_tables(core))
        used = len({block for table in tables for block in table})
        in_tables = sum(map(len, tables))
        if in_tables >= self.num_in_tables:
            self.num_in_tables, self.num_used = in_tables, used

    def after(self, core: SchedulerCore) -> None:
        """Nothing has changed."""


def _tables(core: SchedulerCore) -> Iterator[list[int]]:
    """The block tables of all rows, those of beams included."""
    for seat in seats_of(core):
        tails = seat.beams.tails if seat.beams is not None else []
        yield from ([*seat.blocks, *tail] for tail in tails) if tails else (seat.blocks,)


def cases(prompt: list[int], num_sequences: int, output: int) -> list[Case]:
    """As `n` (or `best_of`) choices, and as one search with that many beams."""
    packed = pack_int32(prompt)
    sampled = [
        Submission(
            choice_id("choices", number),
            "model",
            "completion",
            0.0,
            packed,
            SamplingParams(max_tokens=output, seed=1, choice=number, ignore_eos=True),
            group="choices",
        )
        for number in range(num_sequences)
    ]
    params = SamplingParams(
        max_tokens=output,
        seed=1,
        temperature=0.0,
        ignore_eos=True,
        beam_width=num_sequences,
        num_hypotheses=num_sequences,
    )
    search = Submission("search", "model", "completion", 0.0, packed, params)
    return [
        Case(f"n = {num_sequences}", sampled, num_sequences),
        Case(f"{num_sequences} beams", [search], num_sequences),
    ]


def measure_real_sharing(model: Model, prompt: list[int], num_sequences: int, output: int) -> list[dict[str, Value]]:
    """One prompt; blocks in use against those that all tables would need if none were shared."""
    max_model_len = len(prompt) + output
    num_blocks = num_sequences * -(-max_model_len // BLOCK_SIZE)
    engine = make_engine(model, num_blocks=num_blocks, max_num_seqs=num_sequences, max_model_len=max_model_len)
    rows: list[dict[str, Value]] = []
    for case in cases(prompt, num_sequences, output):
        blocks = Blocks()
        serve(engine, case.submissions, blocks)
        rows.append(
            {
                "sequences": case.name,
                "blocks in tables": float(blocks.num_in_tables),
                "blocks in use": float(blocks.num_used),
                "saved %": 100 * (1 - blocks.num_used / blocks.num_in_tables),
                "copied on write": float(blocks.num_copied),
            }
        )
    return rows
