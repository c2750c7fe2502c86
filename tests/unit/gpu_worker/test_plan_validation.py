"""A plan that breaks the protocol is refused before it touches anything."""

import pytest

from shared.errors import ProtocolError
from shared.messages import NewRow, StepPlan, Tick
from shared.packing import pack_int32
from shared.sampling import SamplingParams

TICK = Tick(0, "0-0", "0-0", 0.0)
PARAMS = SamplingParams(max_tokens=50, seed=0, temperature=0.0, ignore_eos=True)
NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 4, 20, 8


def new_row(row: int, size: int = 10, *, prompt: int | None = None, computed: int = 0) -> NewRow:
    return NewRow(row, f"r{row}", pack_int32(range(3, 3 + size)), prompt or size, computed, PARAMS)


def blocks(*pairs: tuple[int, int]) -> bytes:
    return pack_int32([number for pair in pairs for number in pair])


@pytest.fixture
def engine(make_driver):
    """Row 0 decodes with blocks 0 and 1 and 11 tokens; row 1 is in prefill with block 2, 4 of 10 tokens computed."""
    engine = make_driver(num_blocks=NUM_BLOCKS, max_num_seqs=NUM_ROWS, block_size=BLOCK_SIZE).engine
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
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_plan_is_named_and_changes_nothing(fault: str, engine) -> None:
    changes, message = WRONG[fault]
    before = engine.cache.data.nan_to_num().clone()
    with pytest.raises(ProtocolError, match=rf"plan \d+: .*{message}"):
        engine.step(StepPlan(**{"plan_id": 2, "tick": TICK, **changes}))
    assert engine.cache.data.nan_to_num().equal(before)
    result = engine.step(StepPlan(2, TICK, blocks=blocks((1, 3)), chunks=((1, 6),)))
    assert len(result.tokens) == 8, "the same plan id is still to come, and both rows yield"


def test_a_decode_row_without_a_block_for_its_token(engine) -> None:
    """Row 0 has room for 16 tokens. The 16th is written at the sixth step; the next one has no place."""
    for plan_id in range(2, 8):
        engine.step(StepPlan(plan_id, TICK))
    with pytest.raises(ProtocolError, match="row 0 has no block"):
        engine.step(StepPlan(8, TICK))
    engine.step(StepPlan(8, TICK, blocks=blocks((0, 5))))
