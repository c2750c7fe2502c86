"""When a dead child is started again."""

from services.cli.backoff import Backoff


def test_first_restart_is_immediate_then_the_wait_doubles_up_to_a_cap() -> None:
    backoff = Backoff(base_s=0.5, cap_s=4.0, healthy_after_s=10.0)
    assert [backoff.next_delay(0.1) for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_child_that_ran_for_a_while_starts_anew() -> None:
    backoff = Backoff(base_s=0.5, cap_s=4.0, healthy_after_s=10.0)
    for _ in range(4):
        backoff.next_delay(1.0)
    assert [backoff.next_delay(10.0), backoff.next_delay(1.0)] == [0.0, 0.5]


def test_many_deaths_do_not_overflow() -> None:
    backoff = Backoff()
    assert [backoff.next_delay(0.0) for _ in range(5000)][-1] == backoff.cap_s
