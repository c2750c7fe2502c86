"""The worker process: signals in, exit code out. The main thread waits; one thread computes and touches tensors."""

import logging
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from enum import IntEnum

from services.gpu_worker.service.incarnation import IncarnationFailed
from services.gpu_worker.service.worker import LoadedWorker, LoadProgress, Worker
from shared.errors import ConfigError, ProtocolError

log = logging.getLogger(__name__)

_STUCK_MARGIN_S = 3.0
"""Beyond the drain's grace: a step that runs, then results that go out."""


_FREEING_S = 5.0
"""What the compute thread may take to free its tensors. If the interpreter ends meanwhile, C++ aborts the process."""


class ExitCode(IntEnum):
    """How the process ends. Everything but 0 lets a supervisor start it again."""

    DRAINED = 0
    FAILED = 1
    CONFIG = 2
    PROTOCOL = 3
    OUT_OF_MEMORY = 4
    STUCK = 5
    """A step never ended."""


Load = Callable[[LoadProgress], LoadedWorker]


def run_process(worker: Worker, load: Load, *, drain_grace_s: float, niceness: int) -> int:
    """Run `worker` to its end in a compute thread; SIGTERM and SIGINT drain it, a second one ends it at once.

    Answers the exit code. A step that never returns cannot be joined: then the process ends here.
    """
    news: queue.SimpleQueue[signal.Signals | ExitCode] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        # SimpleQueue.put is the one queue operation that a signal handler may do
        signal.signal(number, lambda received, _: news.put(signal.Signals(received)))
    worker.on_stuck = lambda: news.put(ExitCode.STUCK)
    worker.register()
    thread = threading.Thread(target=_compute, args=(worker, load, niceness, news), name="compute", daemon=True)
    thread.start()
    first = news.get()
    outcome = first if isinstance(first, ExitCode) else _drain(worker, first, news, drain_grace_s)
    worker.release()
    if isinstance(outcome, ExitCode):
        thread.join(_FREEING_S)
        if not thread.is_alive():
            return outcome
    log.warning("ends without waiting for the compute thread")
    logging.shutdown()
    os._exit(outcome if isinstance(outcome, ExitCode) else ExitCode.DRAINED)


def _drain(
    worker: Worker, received: signal.Signals, news: "queue.SimpleQueue[signal.Signals | ExitCode]", grace_s: float
) -> signal.Signals | ExitCode:
    """What the compute thread ends with, or the signal if it has to be left behind."""
    log.info("%s: draining", received.name)
    worker.drain()
    try:
        return news.get(timeout=grace_s + _STUCK_MARGIN_S if worker.is_loaded else 0.1)
    except queue.Empty:
        return received


def _compute(worker: Worker, load: Load, niceness: int, news: "queue.SimpleQueue[signal.Signals | ExitCode]") -> None:
    lower_priority(niceness)
    try:
        worker.run(load)
        news.put(ExitCode.DRAINED)
    except Exception as error:
        news.put(report_crash(error))


def lower_priority(niceness: int) -> None:
    """Let the I/O threads of all processes run before this thread and the threads that it starts (Linux)."""
    if niceness:
        try:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
        except OSError as error:
            log.info("compute keeps its priority: %s", error)


def report_crash(error: Exception) -> ExitCode:
    """Log what ended the worker: ids, places in the code and the kind of error, never a prompt.

    Answers the exit code.
    """
    if isinstance(error, ConfigError):
        log.critical("error: %s", error)
        return ExitCode.CONFIG
    cause = error.cause if isinstance(error, IncarnationFailed) else error
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(cause.__traceback__)]
    log.critical("crash places: %s", " < ".join(reversed(places)))
    code = _exit_code(cause)
    where = f"{error} " if isinstance(error, IncarnationFailed) else ""
    log.critical("crash: %skind=%s error=%s: %s", where, code.name.lower(), type(cause).__name__, _first_line(cause))
    return code


def _exit_code(error: Exception) -> ExitCode:
    if isinstance(error, ProtocolError):
        return ExitCode.PROTOCOL
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.FAILED


def is_out_of_memory(error: Exception) -> bool:
    """Python's and CUDA's errors by type; torch's CPU allocator raises a plain RuntimeError that says so."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
