"""Processes that stand still for longer than their lease and go on: what they still write is refused, and counted."""

import random
import signal
import time
from dataclasses import dataclass

import psutil

from shared.fault_points import FaultPoint
from tests.harness.chaos_plan import LONGEST_PAUSE_S, SHORTEST_PAUSE_S
from tests.harness.fault_run import FaultRun, Scene
from tests.harness.pool_state import wait_for

STREAMS = 16


@dataclass(frozen=True, slots=True)
class _Victim:
    """Whom a scenario pauses."""

    point: FaultPoint
    """Where it stands right before it writes."""
    writer: str
    """As the fence counts its late writes."""
    is_leader: bool

    def pid(self, scene: Scene, place: int) -> int:
        if self.is_leader:
            return wait_for("a leader", scene.pool.leader).pid
        workers = scene.pool.children("gpu_worker")
        return workers[place // 2 % len(workers)].pid

    def generation(self, scene: Scene) -> int:
        """Grows when somebody takes the victim's place."""
        fence = scene.pool.fence()
        return fence.epoch if self.is_leader else sum(worker.incarnation for worker in fence.workers.values())


_WORKER = _Victim(FaultPoint.STEP_COMPUTED, "step", False)
_LEADER = _Victim(FaultPoint.TICK_DECIDED, "tick", True)


def worker_pause(run: FaultRun) -> None:
    """SIGSTOP of a worker past its lease, then SIGCONT: at random instants, and as often right before it appends a
    result."""
    with run.scene("worker-pause") as scene:
        _pause(scene, _WORKER)


def leader_pause(run: FaultRun) -> None:
    """The same for the leader, every second time right before it commits; a standby takes over meanwhile."""
    with run.scene("leader-pause", schedulers=2) as scene:
        _pause(scene, _LEADER)


def _pause(scene: Scene, victim: _Victim) -> None:
    options = scene.run.options
    rng = random.Random(options.seed)
    with scene.load(STREAMS) as load:
        for place in range(2 * options.repeats):
            time.sleep(rng.uniform(0, 1))
            load.wait_in_flight(STREAMS)
            _pause_once(scene, victim, place, rng.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S))
            scene.wait_whole()
    audit = scene.audit(load)
    num_refused = scene.pool.refused_writes(victim.writer)
    scene.run.add_audit(scene.name, audit, faults=2 * options.repeats, late_writes_refused=num_refused)


def _pause_once(scene: Scene, victim: _Victim, place: int, seconds: float) -> None:
    """Odd places: in the window, where the late write must be refused."""
    generation, refused = victim.generation(scene), scene.pool.refused_writes(victim.writer)
    if place % 2:
        _, pid = scene.injector.in_window(victim.point, signal.SIGSTOP)
        process = psutil.Process(pid)
    else:
        process = psutil.Process(victim.pid(scene, place))
        process.suspend()
    started = time.monotonic()
    try:
        wait_for("somebody in its place", lambda: victim.generation(scene) > generation)
        time.sleep(max(0.0, started + seconds - time.monotonic()))
        assert process.status() == psutil.STATUS_STOPPED
    finally:
        process.resume()
    if place % 2:
        wait_for("the refusal", lambda: scene.pool.refused_writes(victim.writer) > refused)
