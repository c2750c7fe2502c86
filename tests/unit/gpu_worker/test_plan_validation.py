"""A plan that breaks the protocol is refused before it touches anything."""

import pytest

from kernels.paged_attention.api import prepare
from services.gpu_worker.engine import inputs
from shared.errors import ProtocolError
from shared.messages import BlockCopies, CopyKind, NewRow, StepPlan, Tick
from shared.packing import pack_int32
from shared.sampling import SamplingParams

TICK = Tick(0, "0-0", "0-0", 0.0)
PARAMS = SamplingParams(max_tokens=50, seed=0, temperature=0.0, ignore_eos=True)
NUM_ROWS, NUM_BLOCKS, NUM_CPU_BLOCKS, BLOCK_SIZE = 4, 20, 6, 8


def new_row(row: int, size: int = 10, *, prompt: int | None = None, computed: int = 0) -> NewRow:
    return NewRow(row, f"r{row}", pack_int32(range(3, 3 + size)), prompt or size, computed, PARAMS)


def blocks(*pairs: tuple[int, int]) -> bytes:
    return pack_int32([number for pair in pairs for number in pair])


def copies(**by_kind: list[tuple[int, int]]) -> tuple[BlockCopies, ...]:
    return tuple(BlockCopies(CopyKind[kind], blocks(*pairs)) for kind, pairs in by_kind.items())


@pytest.fixture
def engine(make_driver):
    """Row 0 decodes with blocks 0 and 1 and 11 tokens; row 1 is in prefill with block 2, 4 of 10 tokens computed."""
    engine = make_driver(
        num_blocks=NUM_BLOCKS, num_cpu_blocks=NUM_CPU_BLOCKS, max_num_seqs=NUM_ROWS, block_size=BLOCK_SIZE
    ).engine
    engine.step(
        StepPlan(
            1, TICK, added=(new_row(0), new_row(1)), blocks=blocks((0, 0), (0, 1), (1, 2)), chunks=((0, 10), (1, 4))
        )
    )
    return engine


WRONG: dict[str, tuple[dict, str]] = {
    "another plan id": ({"plan_id": 3}, "expected plan 2"),
    "dropped row out of range": ({"dropped": (NUM_ROWS,)}, "outside"),
    "added row out of range": ({"added": (new_row(-1),)}, "outside"),
    "added to an occupied row": ({"added": (new_row(0),)}, "holds r0"),
    "added to a row dropped by the same plan": ({"dropped": (0,), "added": (new_row(0),)}, "holds r0"),
    "added twice": ({"added": (new_row(2), new_row(2))}, "twice"),
    "no token": ({"added": (NewRow(2, "r", b"", 0, 0, PARAMS),)}, "prompt tokens"),
    "torn tokens": ({"added": (NewRow(2, "r", b"abc", 1, 0, PARAMS),)}, "no tokens"),
    "more prompt than tokens": ({"added": (new_row(2, 4, prompt=5),)}, "prompt tokens"),
    "all tokens computed": ({"added": (new_row(2, 4, computed=4),)}, "computed"),
    "block id out of range": ({"blocks": blocks((1, NUM_BLOCKS))}, "block id"),
    "negative block id": ({"blocks": blocks((1, -1))}, "block id"),
    "block for a row out of range": ({"blocks": blocks((NUM_ROWS, 3))}, "blocks name a row"),
    "torn block pairs": ({"blocks": pack_int32([1])}, "no pairs"),
    "too many blocks": ({"blocks": blocks(*[(1, 3)] * 64)}, "more than"),
    "chunk of a free row": ({"chunks": ((2, 1),)}, "not in prefill"),
    "chunk of a decode row": ({"chunks": ((0, 1),)}, "not in prefill"),
    "chunk of a dropped row": ({"dropped": (1,), "chunks": ((1, 1),)}, "not in prefill"),
    "chunk beyond the known tokens": ({"blocks": blocks((1, 3)), "chunks": ((1, 7),)}, "chunk of 7 after 4 of 10"),
    "empty chunk": ({"chunks": ((1, 0),)}, "chunk of 0"),
    "two chunks of a row": ({"chunks": ((1, 1), (1, 1))}, "two chunks"),
    "chunk beyond the row's blocks": ({"chunks": ((1, 5),)}, "up to token 9, blocks for 8"),
    "chunk row out of range": ({"chunks": ((9, 1),)}, "outside"),
    "copied out from nowhere": ({"copies": copies(OUT=[(NUM_BLOCKS, 0)])}, "OUT: a source is outside"),
    "copied out too far": ({"copies": copies(OUT=[(0, NUM_CPU_BLOCKS)])}, "OUT: a destination is outside"),
    "copied in from nowhere": ({"copies": copies(IN=[(NUM_CPU_BLOCKS, 9)])}, "IN: a source is outside"),
    "copied in too far": ({"copies": copies(IN=[(0, NUM_BLOCKS)])}, "IN: a destination is outside"),
    "copied within too far": ({"copies": copies(WITHIN=[(0, NUM_BLOCKS)])}, "WITHIN: a destination is outside"),
    "copied from a negative block": ({"copies": copies(WITHIN=[(-1, 9)])}, "WITHIN: a source is outside"),
    "torn copies": ({"copies": (BlockCopies(CopyKind.OUT, pack_int32([1, 2, 3])),)}, "OUT are no pairs"),
    "copied to one block twice": ({"copies": copies(OUT=[(0, 3), (1, 3)])}, "OUT: a destination is named twice"),
    "copied on and on": ({"copies": copies(WITHIN=[(0, 9), (9, 10)])}, "WITHIN: a source is a destination"),
    "copies in another order": ({"copies": copies(IN=[(0, 9)], OUT=[(0, 1)])}, "not in the order"),
    "two lists of one kind": ({"copies": copies(OUT=[(0, 1)]) + copies(OUT=[(1, 2)])}, "not in the order"),
    "out and in again": ({"copies": copies(OUT=[(0, 1)], IN=[(1, 9)])}, "written by OUT and read by IN"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_plan_is_named_and_changes_nothing(fault: str, engine) -> None:
    changes, message = WRONG[fault]
    before = engine.cache.data.nan_to_num().clone()
    host_before = engine.pool.data.nan_to_num().clone()
    with pytest.raises(ProtocolError, match=rf"plan \d+: .*{message}"):
        engine.step(StepPlan(**{"plan_id": 2, "tick": TICK, **changes}))
    assert engine.cache.data.nan_to_num().equal(before)
    assert engine.pool.data.nan_to_num().equal(host_before)
    result = engine.step(StepPlan(2, TICK, blocks=blocks((1, 3)), chunks=((1, 6),)))
    assert len(result.tokens) == 8, "the same plan id is still to come, and both rows yield"


def test_no_row_grows_past_the_longest_even_if_its_last_block_could_hold_it(make_driver) -> None:
    """The model's tables end there."""
    engine = make_driver(num_blocks=4, max_num_seqs=2, block_size=BLOCK_SIZE, max_model_len=12).engine
    engine.step(StepPlan(1, TICK, added=(new_row(0, 11),), blocks=blocks((0, 0), (0, 1)), chunks=((0, 11),)))
    engine.step(StepPlan(2, TICK))  # the 12th token
    with pytest.raises(ProtocolError, match="row 0 has no block for its last token"):
        engine.step(StepPlan(3, TICK))
    long = new_row(1, 13)
    with pytest.raises(ProtocolError, match="chunk up to token 13, blocks for 12"):
        engine.step(StepPlan(3, TICK, dropped=(0,), added=(long,), blocks=blocks((1, 2), (1, 3)), chunks=((1, 13),)))


def test_a_step_takes_no_more_of_the_tables_than_its_contexts_fill(make_driver, monkeypatch) -> None:
    """Whole sixteens of 64 blocks."""
    engine = make_driver(num_blocks=NUM_BLOCKS, max_num_seqs=NUM_ROWS, block_size=BLOCK_SIZE).engine
    widths: list[int] = []

    def record(query_lens, context_lens, tables, k_cache):
        widths.append(tables.shape[1])
        return prepare(query_lens, context_lens, tables, k_cache)

    monkeypatch.setattr(inputs, "prepare", record)
    engine.step(StepPlan(1, TICK, added=(new_row(0),), blocks=blocks((0, 0), (0, 1)), chunks=((0, 10),)))
    many = blocks(*((1, block) for block in range(2, 19)))
    engine.step(StepPlan(2, TICK, added=(new_row(1, 130),), blocks=many, chunks=((1, 130),)))
    assert widths == [16, 32]


def test_a_decode_row_without_a_block_for_its_token(engine) -> None:
    """Row 0 has room for 16 tokens. The 16th is written at the sixth step; the next one has no place."""
    for plan_id in range(2, 8):
        engine.step(StepPlan(plan_id, TICK))
    with pytest.raises(ProtocolError, match="row 0 has no block"):
        engine.step(StepPlan(8, TICK))
    engine.step(StepPlan(8, TICK, blocks=blocks((0, 5))))
