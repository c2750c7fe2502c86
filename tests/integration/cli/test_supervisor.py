"""The supervisor with real child processes: restarts, deaths, endings."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.cli.backoff import Backoff
from services.cli.composition import redis_spec
from services.cli.redis_server import answers, find_redis_server, prepare
from services.cli.signals import SignalInbox, StopRequested
from services.cli.supervisor import Child, ChildFailed, ChildSpec, Supervisor
from shared.redis_client import connect

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def spec(name: str, program: str, *, service: str = "gpu_worker", stop_timeout_s: float = 10.0) -> ChildSpec:
    return ChildSpec(service, name, (sys.executable, "-c", program), dict(os.environ), stop_timeout_s=stop_timeout_s)


class Rig:
    """A supervisor that writes down what it is asked to tell."""

    def __init__(self, folder: Path, inbox: SignalInbox) -> None:
        self.deaths: list[str] = []
        self.notices: list[str] = []
        numbers = itertools.count(1)
        self.supervisor = Supervisor(
            inbox,
            folder,
            new_instance=lambda: f"i{next(numbers)}",
            report_death=self.deaths.append,
            notice=self.notices.append,
            backoff=lambda: Backoff(base_s=0.2, healthy_after_s=60.0),
        )

    def wait_until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.notices
            self.supervisor.wait(0.05)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with SignalInbox() as inbox:
        rig = Rig(tmp_path, inbox)
        yield rig
        rig.supervisor.stop()


def pid(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


def gone(number: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_killed_child_is_reported_and_started_again_with_a_new_instance(rig: Rig) -> None:
    child = rig.supervisor.start(spec("worker-0", SLEEP))
    rig.supervisor.keep_alive()
    first = pid(child)
    os.kill(first, signal.SIGKILL)
    started = time.monotonic()
    rig.wait_until(lambda: child.process is not None and pid(child) != first)
    assert time.monotonic() - started < 1.0
    assert rig.deaths == ["i1"]
    assert child.instance == "i2"
    assert "SIGKILL" in rig.notices[0]


def test_the_child_knows_its_instance(rig: Rig, tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['PAGEWIRE_INSTANCE']); {SLEEP}"
    rig.supervisor.start(spec("worker-0", program))
    rig.wait_until(lambda: (tmp_path / "seen").exists() and (tmp_path / "seen").read_text() == "i1")


def test_a_child_that_keeps_dying_is_started_ever_more_rarely(rig: Rig) -> None:
    child = rig.supervisor.start(spec("worker-0", "raise SystemExit(3)"))
    rig.supervisor.keep_alive()
    started = time.monotonic()
    rig.wait_until(lambda: child.num_restarts == 4)
    # Immediately, then after 0.2, 0.4 and 0.8 s.
    assert time.monotonic() - started > 1.4
    assert rig.deaths == ["i1", "i2", "i3", "i4"]
    assert "exited with code 3" in rig.notices[0]


def test_a_redis_that_is_killed_while_it_rewrites_its_file_leaves_nothing_of_the_new_one(
    rig: Rig, tmp_path: Path
) -> None:
    """A file of up to all of its data, prompts among it, stayed for ever after each such death."""
    own = prepare(tmp_path, find_redis_server())
    child = rig.supervisor.start(redis_spec(own, dict(os.environ)))
    rig.supervisor.keep_alive()
    rig.wait_until(lambda: answers(own.url))
    with contextlib.closing(connect(own.url)) as client:
        client.mset({f"key {k}": "x" * 1000 for k in range(100)})
        client.config_set("rdb-key-save-delay", 1_000_000)  # µs
        client.bgrewriteaof()
    rig.wait_until(lambda: any(tmp_path.glob("temp-*")))
    first = pid(child)
    os.kill(first, signal.SIGKILL)
    rig.wait_until(lambda: child.process is not None and pid(child) != first and answers(own.url))
    assert not list(tmp_path.glob("temp-*"))
    with contextlib.closing(connect(own.url)) as client:
        assert client.dbsize() == 100


def test_a_child_that_ends_while_starting_is_an_error_with_its_last_words(rig: Rig) -> None:
    rig.supervisor.start(spec("worker-0", "import sys; print('first'); print('no such model'); sys.exit(2)"))
    with pytest.raises(ChildFailed, match="worker-0 exited with code 2 while starting: no such model") as caught:
        rig.wait_until(lambda: False)
    assert caught.value.tail == ["first", "no such model"]


def test_a_program_that_does_not_exist_is_an_error(rig: Rig) -> None:
    rig.supervisor.start(ChildSpec("redis", "redis", ("/no/such/program",), dict(os.environ)))
    with pytest.raises(ChildFailed, match="/no/such/program: No such file"):
        rig.wait_until(lambda: False)


def test_children_end_in_the_order_of_the_services(rig: Rig, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        f"def end(*_): open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1] + ' '); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(60)"
    )
    for service in ("redis", "gpu_worker", "scheduler", "gateway"):
        command = (sys.executable, "-c", program, service)
        rig.supervisor.start(ChildSpec(service, service, command, dict(os.environ)))
    rig.wait_until(lambda: all("up" in child.log.read_text() for child in rig.supervisor.children))
    rig.supervisor.stop()
    assert (tmp_path / "order").read_text().split() == ["gateway", "scheduler", "gpu_worker", "redis"]


def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(rig: Rig) -> None:
    grandchild = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', '{SLEEP}']); print(p.pid); "
    child = rig.supervisor.start(spec("worker-0", grandchild + STUBBORN, stop_timeout_s=0.3))
    rig.wait_until(lambda: "up" in child.log.read_text())
    pids = [pid(child), int(child.log.read_text().split()[0])]
    rig.supervisor.stop()
    assert all(gone(number) for number in pids)
    assert "did not end within 0.3 s" in rig.notices[0]


def test_a_second_signal_ends_the_stopping_at_once(rig: Rig) -> None:
    child = rig.supervisor.start(spec("worker-0", STUBBORN, stop_timeout_s=30.0))
    rig.wait_until(lambda: "up" in child.log.read_text())
    number = pid(child)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(StopRequested):
        rig.supervisor.wait(5.0)
    os.kill(os.getpid(), signal.SIGINT)
    started = time.monotonic()
    rig.supervisor.stop()
    assert time.monotonic() - started < 5.0
    assert gone(number)


DRIVER = """
import os, sys
from pathlib import Path
from services.cli.signals import SignalInbox
from services.cli.supervisor import ChildSpec, Supervisor

with SignalInbox() as inbox:
    supervisor = Supervisor(inbox, Path(sys.argv[1]), new_instance=lambda: "i", report_death=print, notice=print)
    sleep = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
    for service in ("redis", "scheduler", "gpu_worker", "gateway"):
        supervisor.start(ChildSpec(service, service, sleep, dict(os.environ)))
    print(*(child.process.pid for child in supervisor.children), flush=True)
    try:
        supervisor.run()
    finally:
        supervisor.stop()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A supervisor in a process of its own, and the pids of its four children, which run."""
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        logs = [tmp_path / f"{name}.log" for name in ("redis", "scheduler", "gpu_worker", "gateway")]
        while not all(log.exists() and "up" in log.read_text() for log in logs):
            time.sleep(0.02)
        yield process, pids
        process.kill()


def test_children_die_when_the_supervisor_is_killed(driver: tuple["subprocess.Popen[str]", list[int]]) -> None:
    process, pids = driver
    assert len(pids) == 4
    assert all(psutil.pid_exists(number) for number in pids)
    process.kill()
    assert all(gone(number) for number in pids)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_leaves_no_process(driver: tuple["subprocess.Popen[str]", list[int]], signum: int) -> None:
    process, pids = driver
    process.send_signal(signum)
    assert process.wait(10) == 0
    assert all(gone(number) for number in pids)


def test_a_child_whose_parent_died_before_the_leash_was_on_leaves() -> None:
    leash = Path("services/cli/leash.py").absolute()
    orphan = [sys.executable, "-I", "-S", str(leash), "1", sys.executable, "-c", "print('ran')"]
    done = subprocess.run(orphan, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (125, "")
