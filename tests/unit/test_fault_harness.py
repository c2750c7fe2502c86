"""The parts of the fault tests that can be judged without a stack."""

import random
import socket
import threading
from pathlib import Path

import pytest

from benchmarks.report import Report
from tests.harness import crowd
from tests.harness.audit import Audit
from tests.harness.chaos_plan import KILLS, WINDOWS, Action, FaultKind, plan_faults, spread
from tests.harness.fault_pages import write_pages
from tests.harness.fault_run import FaultRun, Options, Recovery
from tests.harness.injector import Hit
from tests.harness.proxy import TcpProxy
from tests.harness.sizes import Sizes
from tests.harness.streams import Outcome, Reference

REFERENCE = Reference({}, "abcd", (1, 2, 3, 4))


def outcome(text: str = "abcd", reasons: tuple[str, ...] = ("length",), counts: tuple[int, ...] = (4,)) -> Outcome:
    return Outcome(REFERENCE, 0.0, text, list(reasons), [{"completion_tokens": count} for count in counts])


def test_a_plan_depends_on_its_seed_alone() -> None:
    wanted = {**spread(200, KILLS), **dict.fromkeys(WINDOWS, 10)}
    plan = plan_faults(3, wanted)
    assert plan == plan_faults(3, dict(reversed(wanted.items()))) != plan_faults(4, wanted)
    assert {kind: sum(fault.kind == kind for fault in plan) for kind in wanted} == wanted
    assert sum(fault.kind.action is Action.KILL for fault in plan) == 200


def test_only_pauses_last() -> None:
    kinds = (FaultKind(Action.PAUSE, "gpu_worker"), FaultKind(Action.KILL, "gpu_worker"))
    assert {fault.kind.action for fault in plan_faults(0, spread(9, kinds)) if fault.seconds} == {Action.PAUSE}


@pytest.mark.parametrize(
    "wrong",
    [
        outcome("abc"),
        outcome("abccd"),
        outcome("abxd"),
        outcome(reasons=()),
        outcome(reasons=("length", "length")),
        outcome(counts=()),
        outcome(counts=(3,)),
        outcome(counts=(4, 4)),
    ],
)
def test_a_stream_that_is_not_exactly_its_reference_is_a_fault(wrong: Outcome) -> None:
    assert wrong.fault()
    assert not outcome().fault()


def answer(text: str, tokens: int, reason: str = "length") -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


@pytest.mark.parametrize(
    ("chunks", "ending"),
    [
        ([answer("ab", 2)], "complete"),
        ([{"choices": [{"text": "a", "finish_reason": None}]}, answer("b\ufffd", 2)], "complete"),
        ([], "incomplete"),
        ([{"error": {}}], "incomplete"),
        ([answer("b", 2)], "another text"),
        ([answer("ab", 3)], "another end"),
        ([answer("ab", 2, "stop")], "another end"),
    ],
)
def test_an_answer_in_a_crowd_is_the_beginning_of_its_text(chunks: list[dict[str, object]], ending: str) -> None:
    (visit,) = crowd.plan_visits(0, [Reference({"stream_options": {}}, "abc", (1, 2, 3))], 1, leaving=0, max_tokens=1)
    visit.body["max_tokens"] = 2
    assert crowd.judge(visit, chunks) == ending


def test_growth_is_told_of_what_was_sampled_when_warm() -> None:
    sizes = Sizes({"flat": [1.0, *[5.0] * 9], "grown": [1.0, *(float(size) for size in range(2, 11))]})
    flat, grown = sizes.rows()
    assert flat["growth"] == 1.0 and grown["growth"] == 10.0 / 6.0


def test_recovery_is_the_longest_pause_after_the_fault() -> None:
    stream = outcome()
    stream.arrivals = [1.0, 2.0, 5.0, 5.5, 9.0]
    assert stream.recovery_s(3.0, 6.0) == 2.0
    assert stream.recovery_s(3.0, 10.0) == 3.5
    assert stream.recovery_s(0.5, 10.0) is None
    assert stream.recovery_s(9.5, 10.0) is None


def test_resuming_is_measured_from_the_connection_that_brought_text() -> None:
    stream = outcome()
    stream.connects, stream.arrivals = [0.0, 2.0, 3.0], [1.0, 3.25, 4.0]
    assert stream.resumptions_s() == [0.25]


def test_the_proxy_forwards_delays_and_cuts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        with TcpProxy("127.0.0.1", server.getsockname()[1]) as proxy:
            address = ("127.0.0.1", proxy.port)
            with socket.create_connection(address, timeout=10) as first:
                first.sendall(b"one")
                assert first.recv(10) == b"one"
                proxy.delay_s = 0.05
                first.sendall(b"two")
                assert first.recv(10) == b"two" and proxy.num_delayed == 2
                assert proxy.cut(random.Random(0)) == proxy.num_cut == 1
                with pytest.raises(ConnectionError):
                    first.recv(10)
            proxy.go_down()
            with pytest.raises(ConnectionError), socket.create_connection(address, timeout=10) as refused:
                refused.recv(10)


def _echo(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_echo_one, args=(connection,), daemon=True).start()


def _echo_one(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(100):
            connection.sendall(data)


def test_the_report_has_a_page_and_a_plot(tmp_path: Path) -> None:
    run = FaultRun(Options(), Report("faults"), tmp_path)
    run.add_recovery(Recovery("worker-kill", [1.0, 2.0, 5.0], limit_s=4.0))
    run.add_recovery(Recovery("nothing hit", limit_s=4.0))
    run.add_audit("random-kills", Audit(num_streams=3, faults=["one"]))
    run.curves["soak"] = {"gateway-0 MiB": [1.0, 2.0]}
    run.hits.append(("random-kills", Hit(plan_faults(0, {KILLS[0]: 1})[0], 1.0, "gateway-0 17", 32)))
    write_pages(run, tmp_path)
    page = (tmp_path / "fault.md").read_text()
    assert "MISSED  worker-kill: p99 recovery: 5" in page and "MISSED  not measured: nothing hit" in page
    assert "| random-kills | gateway kill | gateway-0 17 | 32 |" in page
    assert (tmp_path / "fault.png").stat().st_size > 1000
    assert run.report.finish(tmp_path / "fault.json") == 1
