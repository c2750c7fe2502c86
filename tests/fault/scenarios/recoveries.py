"""How long streams pause after one kind of fault: from the fault to the end of the longest pause that follows it."""

import random
import time
from collections.abc import Callable, Iterator

import psutil

from services.cli.state_dir import ChildState
from tests.harness.fault_run import WORKERS, FaultRun, Recovery, Scene
from tests.harness.pool_state import wait_for
from tests.harness.streams import Outcome, StreamLoad

STREAMS = 16
WORKER_LIMIT_S, LEASE_LIMIT_S, STANDBY_LIMIT_S, RESUME_LIMIT_S = 4.0, 6.0, 3.5, 0.2
LONGEST_WAIT_S = 1.0
LEAST_ROWS = STREAMS // WORKERS - 2
"""On each worker when a fault comes. One that is just back has none: the death of the other one would tell how long it
takes to compute all streams again, not what a pool of two needs."""


def worker_kill(run: FaultRun) -> None:
    """The supervisor sees a worker die; a second one is there."""
    _measure(run, Recovery("worker-kill", limit_s=WORKER_LIMIT_S), _kill_worker)


def worker_lease(run: FaultRun) -> None:
    """As before, but the supervisor is stopped meanwhile: only the lease tells."""
    _measure(run, Recovery("worker-lease", limit_s=LEASE_LIMIT_S), _kill_worker_unseen)


def scheduler_kill(run: FaultRun) -> None:
    """The leader dies, and a standby goes on."""
    _measure(run, Recovery("scheduler-kill", limit_s=STANDBY_LIMIT_S), _kill_leader, schedulers=2)


def gateway_resume(run: FaultRun) -> None:
    """A gateway dies: its streams are taken up at another one. Measured from connecting there to the next text."""
    recovery = Recovery("gateway-resume", limit_s=RESUME_LIMIT_S)
    with run.scene(recovery.kind) as scene:
        with scene.load(STREAMS) as load:
            for place in _moments(scene, load):
                scene.injector.end(scene.pool.children("gateway")[place % 2])
                scene.settle(load)
        recovery.pauses = [pause for outcome in load.ended for pause in outcome.resumptions_s()]
        _tell(scene, recovery, load)


def _measure(run: FaultRun, recovery: Recovery, strike: Callable[[Scene, int], None], **flags: object) -> None:
    struck: list[tuple[list[Outcome], float]] = []
    with run.scene(recovery.kind, **flags) as scene:
        with scene.load(STREAMS) as load:
            for place in _moments(scene, load):
                struck.append((load.in_flight, time.monotonic()))
                strike(scene, place)
                scene.settle(load)
        recovery.observe(struck)
        _tell(scene, recovery, load)


def _moments(scene: Scene, load: StreamLoad) -> Iterator[int]:
    """A random moment for each repetition, with all streams in flight, on all workers."""
    rng = random.Random(scene.run.options.seed)
    for place in range(scene.run.options.repeats):
        wait_for("streams on every worker", lambda: _least_rows(scene) >= LEAST_ROWS)
        time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        load.wait_in_flight(STREAMS)
        yield place


def _least_rows(scene: Scene) -> int:
    rows = scene.pool.rows_by_worker()
    return min(rows.values()) if len(rows) == WORKERS else 0


def _tell(scene: Scene, recovery: Recovery, load: StreamLoad) -> None:
    scene.run.add_recovery(recovery)
    scene.run.add_audit(scene.name, scene.audit(load), faults=scene.run.options.repeats)


def _kill_worker(scene: Scene, place: int) -> None:
    scene.injector.end(_worker(scene, place))


def _worker(scene: Scene, place: int) -> ChildState:
    """In turn: whoever dies again and again is started again later and later."""
    return scene.pool.children("gpu_worker")[place % WORKERS]


def _kill_worker_unseen(scene: Scene, place: int) -> None:
    before = scene.pool.fence().workers
    victim = _worker(scene, place)
    supervisor = psutil.Process(scene.stack.process.pid)
    supervisor.suspend()
    try:
        scene.injector.end(victim)
        wait_for("the fence", lambda: _incarnation(scene, victim.name) > before[victim.name].incarnation)
    finally:
        supervisor.resume()


def _incarnation(scene: Scene, worker: str) -> int:
    return scene.pool.fence().workers[worker].incarnation


def _kill_leader(scene: Scene, _: int) -> None:
    epoch = scene.pool.fence().epoch
    scene.injector.end(wait_for("a leader", scene.pool.leading_child))
    wait_for("another leader", lambda: scene.pool.fence().epoch > epoch)
