import numpy as np
import pytest

from services.gpu_worker.engine.copy_order import CopyOrder
from shared.messages import CopyKind

PAIRS = np.array([(3, 0), (9, 1)])


@pytest.mark.parametrize(
    ("kind", "written", "waits"),
    [
        (CopyKind.OUT, [1, 2], False),  # a copy out reads: others may be written meanwhile
        (CopyKind.OUT, [1, 9], True),
        (CopyKind.IN, [5], True),  # the step may read what comes in
        (CopyKind.WITHIN, [5], True),
    ],
)
def test_a_step_waits_for_copies_that_it_depends_on(kind: CopyKind, written: list[int], waits: bool) -> None:
    order = CopyOrder()
    assert not order.holds_up(np.array(written))
    order.add(kind, PAIRS)
    assert order.holds_up(np.array(written)) is waits


def test_every_copy_since_the_last_wait_counts() -> None:
    order = CopyOrder()
    order.add(CopyKind.OUT, PAIRS)
    order.add(CopyKind.OUT, np.array([(4, 7)]))
    assert order.holds_up(np.array([3])) and order.holds_up(np.array([4])) and not order.holds_up(np.array([7]))
    order.clear()
    assert not order.holds_up(np.array([3, 4, 9]))
