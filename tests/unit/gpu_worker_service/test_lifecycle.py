"""How a worker process ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from services.gpu_worker.service import lifecycle
from services.gpu_worker.service.lifecycle import ExitCode, run_process
from services.gpu_worker.service.worker import Worker
from shared.errors import ConfigError


class Tensor:
    """Takes a while to free."""

    num_freed = 0

    def __del__(self) -> None:
        time.sleep(0.3)
        Tensor.num_freed += 1


class FailingWorker:
    is_loaded = False

    def register(self) -> None: ...
    def release(self) -> None: ...

    def run(self, load: Any) -> None:
        weights = Tensor()
        raise ConfigError(f"no room beside {type(weights).__name__}")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_tensors_are_freed_before_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is still freeing them then is unwound through C++, which aborts: the exit code would be lost."""
    monkeypatch.setattr(lifecycle.log, "disabled", True)  # pytest keeps what is logged, and with it the error's frames
    worker = cast(Worker, FailingWorker())
    code = run_process(worker, lambda _: pytest.fail("not called"), drain_grace_s=0.0, niceness=0)
    assert code == ExitCode.CONFIG and Tensor.num_freed == 1


STUCK = """
import threading
from services.gpu_worker.service import lifecycle

lifecycle._FREEING_S = 0.1

class StuckWorker:
    is_loaded = True
    def register(self): pass
    def release(self): print("released", flush=True)
    def run(self, load):
        self.on_stuck()
        threading.Event().wait()

lifecycle.run_process(StuckWorker(), None, drain_grace_s=0.0, niceness=0)
"""


def test_a_process_whose_step_never_ends_gives_its_lease_back_and_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (ExitCode.STUCK, "released\n")
