"""Which ready process may have a seat whose holder nobody has seen dying."""

import pytest

from services.scheduler.service.workers import _succeeds


@pytest.mark.parametrize(
    ("instance", "holder", "succeeds"),
    [
        ("ab.1", "ab", True),
        ("ab.2", "ab.1", True),
        ("ab.10", "ab.9", True),
        ("ab.1", "ab.2", False),
        ("ab.1", "ab.1", False),
        ("ab", "ab.1", False),
        ("cd.1", "ab", False),
        ("cd", "ab", False),
        ("ab.x", "ab", False),
        ("ab.1", "ab.x", False),
        ("abc.2", "ab.1", False),
    ],
)
def test_a_later_name_of_one_process_succeeds_its_former_one(instance: str, holder: str, succeeds: bool) -> None:
    assert _succeeds(instance, holder) is succeeds
