"""The fake worker must notice what it is there to notice; otherwise the property test proves nothing."""

from collections.abc import Callable

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.history import TokenHistory
from services.scheduler.core.request import Request
from shared.messages import BlockCopies, CopyKind, NewRow, StepPlan, Tick
from shared.packing import pack_int32, unpack_int32
from tests.fakes.content_worker import ContentWorker, ProtocolViolation, reference_output
from tests.fakes.scheduler_world import World, make_submission

SUBMISSION = make_submission("r", [3, 1, 4, 1, 5], max_tokens=12, ignore_eos=True)
OTHER = make_submission("other", [2, 7, 1, 8, 2], max_tokens=12, ignore_eos=True)
TICK = Tick(1, "0-0", "0-0", 0.0)


def make_worker() -> ContentWorker:
    return ContentWorker("w", 1, num_blocks=12, block_size=4, max_num_seqs=4, max_tokens=64, num_cpu_blocks=3)


def copies(kind: CopyKind, *pairs: tuple[int, int]) -> BlockCopies:
    return BlockCopies(kind, pack_int32([value for pair in pairs for value in pair]))


def start(*blocks: int, row: int = 0, request_id: str = "r", prompt: bytes = SUBMISSION.prompt_tokens) -> StepPlan:
    new = NewRow(row, request_id, prompt, 5, 0, SUBMISSION.params)
    pairs = pack_int32([value for block in blocks for value in (row, block)])
    return StepPlan(1, TICK, added=(new,), blocks=pairs, chunks=((row, 5),))


def output_of(worker: ContentWorker, num_steps: int, row: int = 0) -> list[int]:
    plans = [StepPlan(worker.last_plan + 1 + index, TICK) for index in range(num_steps)]
    return [unpack_int32(worker.execute(plan).tokens)[row] for plan in plans]


def test_through_the_right_blocks_the_text_is_the_reference() -> None:
    worker = make_worker()
    first = unpack_int32(worker.execute(start(7, 2, 9, 0)).tokens)[0]
    assert [first, *output_of(worker, 11)] == reference_output(SUBMISSION)[0]


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda worker: worker.memory.__setitem__(7 * 4, 20),
        lambda worker: worker.rows[0].blocks.__setitem__(0, 5),
        lambda worker: worker.rows[0].blocks.reverse(),
    ],
    ids=["overwritten slot", "wrong block", "wrong order"],
)
def test_one_wrong_block_changes_the_text(corrupt: Callable[[ContentWorker], None]) -> None:
    worker = make_worker()
    worker.execute(start(7, 2, 9, 0))
    corrupt(worker)
    assert output_of(worker, 11) != reference_output(SUBMISSION)[0][1:]


def test_a_block_in_two_tables_changes_a_text() -> None:
    worker = make_worker()
    one, two = start(7, 2, 9, 0), start(8, 2, 4, 1, row=1, request_id="other", prompt=OTHER.prompt_tokens)
    both = StepPlan(1, TICK, added=(*one.added, *two.added), blocks=one.blocks + two.blocks, chunks=((0, 5), (1, 5)))
    worker.execute(both)
    rows = list(zip(*[unpack_int32(worker.execute(StepPlan(2 + i, TICK)).tokens) for i in range(11)], strict=True))
    references = [reference_output(submission)[0][1:] for submission in (SUBMISSION, OTHER)]
    assert [list(row) for row in rows] != references


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(3, TICK),
        StepPlan(2, TICK, added=start(3).added),
        StepPlan(2, TICK, blocks=pack_int32([3, 1])),
        StepPlan(2, TICK, blocks=pack_int32([0, 99])),
        StepPlan(2, TICK, chunks=((0, 1),)),
        StepPlan(2, TICK, chunks=((2, 1),)),
    ],
    ids=["gap", "row in use", "block for no row", "no such block", "chunk of a decode row", "chunk of no row"],
)
def test_a_plan_that_cannot_be_carried_out_is_noticed(plan: StepPlan) -> None:
    worker = make_worker()
    worker.execute(start(7, 2, 9, 0))
    with pytest.raises(ProtocolViolation):
        worker.execute(plan)


def test_a_row_without_blocks_is_noticed() -> None:
    worker = make_worker()
    worker.execute(start(7, 2))
    with pytest.raises(ProtocolViolation, match="has 2 blocks"):
        output_of(worker, 11)


def test_a_row_goes_to_the_host_and_back_into_other_blocks() -> None:
    """It leaves with 8 of 9 tokens computed; while it is away, another row writes where it was."""
    worker = make_worker()
    first = unpack_int32(worker.execute(start(7, 2)).tokens)[0]
    told = [first, *output_of(worker, 3)]
    out = copies(CopyKind.OUT, (7, 2), (2, 0))
    other = start(7, 2, row=1, request_id="other", prompt=OTHER.prompt_tokens)
    worker.execute(
        StepPlan(5, TICK, dropped=(0,), added=other.added, blocks=other.blocks, chunks=((1, 5),), copies=(out,))
    )
    back = NewRow(0, "r", SUBMISSION.prompt_tokens + pack_int32(told), 5, 8, SUBMISSION.params)
    blocks = pack_int32([0, 9, 0, 4, 0, 5, 0, 6])
    into = copies(CopyKind.IN, (2, 9), (0, 4))
    plan = StepPlan(6, TICK, dropped=(1,), added=(back,), blocks=blocks, chunks=((0, 1),), copies=(into,))
    told.append(unpack_int32(worker.execute(plan).tokens)[0])
    assert told + output_of(worker, 7) == reference_output(SUBMISSION)[0]
    assert worker.num_copied == {CopyKind.OUT: 2, CopyKind.IN: 2}


def test_a_block_is_copied_before_the_plan_writes_to_it() -> None:
    """A fork: the second row begins with a copy of the first one's partial block, and both write on."""
    worker = make_worker()
    told = [unpack_int32(worker.execute(start(7, 2, 9, 0)).tokens)[0], *output_of(worker, 1)]
    fork = NewRow(1, "r#1", SUBMISSION.prompt_tokens + pack_int32(told), 5, 6, SUBMISSION.params)
    within = copies(CopyKind.WITHIN, (2, 3))
    blocks = pack_int32([1, 7, 1, 3, 1, 4, 1, 5])
    plan = StepPlan(3, TICK, added=(fork,), blocks=blocks, chunks=((1, 1),), copies=(within,))
    rows = [list(unpack_int32(worker.execute(plan).tokens))]
    rows += [list(unpack_int32(worker.execute(StepPlan(4 + index, TICK)).tokens)) for index in range(9)]
    text = reference_output(SUBMISSION)[0]
    assert [told + [row[index] for row in rows] for index in (0, 1)] == [text, text]


@pytest.mark.parametrize(
    "wrong",
    [
        (copies(CopyKind.OUT, (7, 3)),),
        (copies(CopyKind.OUT, (12, 0)),),
        (copies(CopyKind.OUT, (9, 0)),),
        (copies(CopyKind.IN, (0, 9)),),
        (copies(CopyKind.OUT, (7, 0), (2, 0)),),
        (copies(CopyKind.WITHIN, (7, 2), (2, 9)),),
        (copies(CopyKind.OUT, (7, 0)), copies(CopyKind.IN, (0, 9))),
        (copies(CopyKind.WITHIN, (7, 9)), copies(CopyKind.OUT, (2, 0))),
    ],
    ids=["no host block", "no block", "empty block", "empty host block", "twice", "chain", "out and in", "order"],
)
def test_a_copy_that_cannot_be_meant_is_noticed(wrong: tuple[BlockCopies, ...]) -> None:
    worker = make_worker()
    worker.execute(start(7, 2, 9))
    with pytest.raises(ProtocolViolation):
        worker.execute(StepPlan(2, TICK, copies=wrong))


def _play_full_pool() -> None:
    world = World(SchedulerConfig(max_model_len=60, block_size=2, max_num_seqs=6, max_num_batched_tokens=16))
    world.join("w", 26)
    for index in range(20):
        world.submit(make_submission(f"r{index}", [1 + index] * (3 + index % 9), max_tokens=16, stop_token_ids=(3, 4)))
    world.settle()
    world.judge_idle()


def test_the_world_notices_blocks_that_are_freed_under_a_plan_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    _play_full_pool()
    monkeypatch.setattr(
        "services.scheduler.core.blocks.BlockPool.quarantine", lambda self, blocks, until: self.release(blocks)
    )
    with pytest.raises(AssertionError, match="named by an unanswered plan"):
        _play_full_pool()


def test_the_world_notices_a_token_from_the_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenHistory.row
    monkeypatch.setattr(TokenHistory, "row", lambda self, row, start, stop: right(self, row ^ 1, start, stop))
    with pytest.raises(AssertionError):
        _play_full_pool()


def test_the_world_notices_a_lost_token(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Request.known_tokens
    monkeypatch.setattr(Request, "known_tokens", lambda self: known(self)[:-4] + pack_int32([1]))
    with pytest.raises(AssertionError):
        _play_full_pool()
