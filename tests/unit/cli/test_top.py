"""What `pagewire top` makes of a frame."""

import io
import os
import pty
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli import top
from services.cli.main import app
from services.cli.pool_frame import PoolFrame, PoolUnreachable
from services.cli.top import render
from shared.messages import (
    Lease,
    PoolOverview,
    PoolStats,
    RequestOverview,
    WorkerOverview,
    WorkerState,
)


def shown(frame: PoolFrame, num_rows: int = 10) -> list[str]:
    screen = io.StringIO()
    Console(width=160, file=screen).print(render(frame, num_rows))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def lease(name: str, state: WorkerState, progress: float = 1.0) -> Lease:
    return Lease("gpu_worker", name, "i", 1, state, progress=progress)


def worker(name: str, block_map: str = "##+.") -> WorkerOverview:
    return WorkerOverview(name, 1, False, 3, 1, 8, 2, 100, 40, 20, 0, 50.0, 25.0, block_map)


def request(name: str, **where: object) -> RequestOverview:
    return RequestOverview(name, "waiting", 10, 5, 0, 1.5, **where)  # type: ignore[arg-type]


def test_every_worker_is_listed_with_its_state() -> None:
    members = [
        lease("w-ready", WorkerState.READY),
        lease("w-loading", WorkerState.LOADING, 0.25),
        lease("w-joining", WorkerState.READY),
        lease("w-draining", WorkerState.DRAINING),
    ]
    overview = PoolOverview(1.0, (worker("w-ready"), worker("w-draining"), worker("w-silent")))
    lines = {line.split()[0]: line for line in shown(PoolFrame("p", members=members, overview=overview)) if line}
    assert lines["w-ready"].split()[1:] == ["ready", "3/8", "1", "2", "40", "20", "40", "25.0", "50.0", "##+."]
    assert lines["w-loading"].split()[1:3] == ["loading", "25%"]
    assert lines["w-joining"].split()[1] == "joining"
    assert lines["w-draining"].split()[1] == "draining"
    assert lines["w-silent"].split()[1] == "silent"


def test_requests_share_the_rows_and_say_where_they_are() -> None:
    running = tuple(request(f"run{n}", worker="w", row=n) for n in range(20))
    waiting = tuple(request(f"wait{n}", reason="behind", detail="run0 goes first") for n in range(20))
    swapped = (request("out", worker="w", reason="swapped", detail="its KV lies in the host memory of w"),)
    lines = shown(PoolFrame("p", overview=PoolOverview(1.0, (), running, waiting, swapped)))
    names = [line.split()[0] for line in lines if line]
    assert [name for name in names if name.startswith("run") and name != "running:"] == [f"run{n}" for n in range(5)]
    assert [name for name in names if name.startswith("wait") and name != "waiting:"] == [f"wait{n}" for n in range(5)]
    assert any(line.startswith("run0") and line.endswith("w row 0") for line in lines)
    assert any(line.startswith("out") and "swapped: its KV lies" in line for line in lines)
    assert any(line.startswith("wait0") and line.endswith("behind: run0 goes first") for line in lines)


def test_figures_are_those_of_the_leader() -> None:
    stats = PoolStats(
        3, 77, 4, 2, num_blocks=100, num_free_blocks=50, num_cached_blocks=25, num_preemptions=6, num_workers=1,
        num_plans=9, num_ignored_messages=0, prefix_cache_queries=200, prefix_cache_hits=50, num_requests_swapped=1,
        waiting_by_reason=(("behind", 1), ("blocks", 1)), oldest_wait_s=2.25, num_handovers=5,
    )  # fmt: skip
    leader = Lease("scheduler", "scheduler-0", "i", 1, WorkerState.READY)
    text = "\n".join(shown(PoolFrame("p", leader=leader, stats=stats)))
    assert "leader scheduler-0 epoch 3 tick 77" in text
    assert "running 4  waiting 2 (behind 1, blocks 1, oldest 2.2 s)  swapped 1" in text
    assert "prefix hits 25%" in text and "used 25 (25%)  cached 25  free 50" in text
    assert "preempted 6  handed over 5" in text


def test_names_with_brackets_are_not_taken_for_markup() -> None:
    overview = PoolOverview(1.0, waiting=(request("r[red]x", reason="rows", detail="[bold]"),))
    text = "\n".join(shown(PoolFrame("p", overview=overview)))
    assert "r[red]x" in text and "rows: [bold]" in text


def test_into_a_pipe_every_frame_is_printed_until_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live view of a terminal would print nothing there before its end."""
    reading, writing = os.pipe()
    frames = iter(["first", "second", "third"])
    monkeypatch.setattr(top, "read_frame", lambda *_: PoolFrame(next(frames)))
    seen: list[str] = []

    def sleep(_: float) -> None:
        seen.append(os.read(reading, 65536).decode())
        if len(seen) == 2:
            os.close(reading)

    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(time, "sleep", sleep)
        with pytest.raises(SystemExit):
            top.show_live("redis://127.0.0.1:1/0", "p", interval_s=1.0)
    assert [text.split()[2] for text in seen] == ["first", "second"]


def test_on_a_terminal_the_last_frame_stays_while_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a screen of its own, which Ctrl-C leaves."""
    away = PoolUnreachable("Redis does not answer")
    answers: Iterator[PoolFrame | PoolUnreachable] = iter([PoolFrame("first"), away, PoolFrame("second")])
    terminal, screen = pty.openpty()
    seen: list[str] = []

    def read(*_: object) -> PoolFrame:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, PoolUnreachable):
            raise answer
        return answer

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(top, "read_frame", read)
    monkeypatch.setattr(time, "sleep", lambda _: seen.append(os.read(terminal, 65536).decode()))
    with os.fdopen(screen, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        top.show_live("redis://127.0.0.1:1/0", "p", interval_s=1.0)
        left = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert ["pool first" in text for text in seen] == [True, True, False] and "pool second" in seen[2]
    assert ["Redis does not answer" in text for text in seen] == [False, True, False]
    assert "\x1b[?1049h" in seen[0] and "\x1b[?1049l" in left, "the screen that was there before comes back"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--once", "--redis-url", "nonsense"), 1, "error: Redis URL"),
        (("--once", "--redis-url", "redis://h:99999/0"), 1, "error: Redis URL"),
        (("--interval", "inf"), 2, "--interval"),
    ],
)
def test_what_it_cannot_do_is_one_line(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = CliRunner().invoke(app, ["top", *arguments])
    assert done.exit_code == code and words in done.stderr and "Traceback" not in done.stderr
