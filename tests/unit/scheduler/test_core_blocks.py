"""The block pool alone."""

from services.scheduler.core.blocks import AllocStatus, BlockPool
from services.scheduler.core.extents import FreeExtents
from services.scheduler.core.history import TokenHistory
from shared.packing import NO_TOKEN, pack_int32


def test_status_says_now_later_or_never() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    assert [pool.status(n) for n in (1, 2, 5)] == [AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER]


def test_a_table_gets_a_contiguous_run_where_it_can() -> None:
    pool = BlockPool(8)
    table = pool.allocate(3)
    assert table == [0, 1, 2]
    assert pool.allocate_each([table[-1]]) == [3]
    pool.release([1])
    assert pool.allocate(2, after=3) == [4, 5]
    assert pool.allocate(2) == [6, 7]
    assert pool.allocate(1) == [1]


def test_a_shared_block_is_free_after_its_last_table() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    assert pool.references(block) == 1
    pool.release([block])
    assert pool.num_free == 2


def test_quarantine_holds_blocks_until_the_plan_is_answered() -> None:
    pool = BlockPool(4)
    early, late = pool.allocate(2), pool.allocate(1)
    pool.quarantine(early, until=5)
    pool.quarantine(late, until=6)
    pool.settle(4)
    assert (pool.num_free, pool.num_quarantined) == (1, 3)
    pool.settle(5)
    assert (pool.num_free, pool.num_quarantined) == (3, 1)
    pool.settle(6)
    assert (pool.num_free, pool.num_quarantined) == (4, 0)


def test_a_pool_rebuilt_from_its_free_runs_hands_out_the_same_blocks() -> None:
    pool = BlockPool(16)
    table = pool.allocate(9)
    pool.release(table[1:8:3])
    again = BlockPool(16)
    again.free = FreeExtents(pool.free.runs())
    assert pool.allocate(6, after=3) == again.allocate(6, after=3)


def test_history_gives_a_row_back_as_a_column() -> None:
    history = TokenHistory(width=4, base=7)
    history.append(pack_int32([10, 11, 12]))
    history.append(pack_int32([20]))
    history.append(pack_int32([30, 31, 32, 33]))
    assert list(history.row(1, 7, 10)) == [11, NO_TOKEN, 31]
    assert list(history.row(0, 8, 9)) == [20]
    history.clear()
    history.append(pack_int32([40, 41]))
    assert (history.base, history.end, list(history.row(1, 10, 11))) == (10, 11, [41])
