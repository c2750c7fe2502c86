"""kill -9 at random moments and in named windows, SIGTERM, SIGSTOP: no client notices anything but a pause."""

import time
from collections.abc import Mapping

from benchmarks.report import Bar
from tests.harness.chaos_plan import KILLS, PAUSES, TERMS, WINDOWS, Action, Fault, FaultKind, plan_faults, spread
from tests.harness.fault_model import DEFAULT, TINY
from tests.harness.fault_run import FaultRun, Scene
from tests.harness.streams import StreamLoad

SPARE = 8
"""Clients more than streams that must be in flight: some are always between two streams."""
MOST_TRIES = 5
"""A fault that hit with too few streams in flight does not count; it is tried again."""
SMALL_POOL = {"num_cpu_blocks": 400, "preemption": "swap"}
NUM_BLOCKS = {TINY: 260, DEFAULT: 140}
"""A worker's: both together have about as many as the streams of this model fill, one alone swaps all the time."""


def random_kills(run: FaultRun) -> None:
    """Random kills over gateway, scheduler and worker."""
    strike_all(run, "random-kills", spread(run.options.kills, KILLS))


def windows(run: FaultRun) -> None:
    """Each named window, several times."""
    strike_all(run, "windows", dict.fromkeys(WINDOWS, run.options.windows), schedulers=2)


def drains(run: FaultRun) -> None:
    """SIGTERM to gateway, scheduler and worker: streams end there, or go on elsewhere."""
    strike_all(run, "drains", spread(run.options.repeats, TERMS), schedulers=2)


def stops(run: FaultRun) -> None:
    """SIGSTOP of gateway, scheduler and worker for longer than a lease, then SIGCONT."""
    strike_all(run, "stops", spread(run.options.repeats, PAUSES), schedulers=2)


def sampling(run: FaultRun) -> None:
    """Workers die under streams that sample at temperature 0.9: their seeds say what comes next."""
    with run.scene("sampling") as scene:
        scene.references = [reference for reference in scene.references if reference.body["temperature"]]
        _strike(scene, {FaultKind(Action.KILL, "gpu_worker"): run.options.repeats})


def strike_all(run: FaultRun, name: str, wanted: Mapping[FaultKind, int], **flags: object) -> None:
    """These faults, in an order and at moments that the seed decides, one after another on one stack."""
    with run.scene(name, **SMALL_POOL, num_blocks=NUM_BLOCKS[run.options.model], **flags) as scene:
        _strike(scene, wanted)


def _strike(scene: Scene, wanted: Mapping[FaultKind, int]) -> None:
    options, num_counted = scene.run.options, 0
    with scene.load(options.streams + SPARE) as load:
        for fault in plan_faults(options.seed, wanted):
            num_counted += _strike_once(scene, fault, load)
        scene.wait_whole()
    scene.run.add_audit(scene.name, scene.audit(load), faults=num_counted)
    name = f"{scene.name}: faults with {options.streams} streams in flight or more"
    scene.run.report.bars.append(Bar(name, num_counted, sum(wanted.values()), "", at_least=True))


def _strike_once(scene: Scene, fault: Fault, load: StreamLoad) -> bool:
    """Whether the fault hit with enough streams in flight."""
    wanted = scene.run.options.streams
    for _ in range(MOST_TRIES):
        hit = scene.strike(fault, load, wanted)
        said = f"{hit.num_in_flight} streams in flight, {time.monotonic() - scene.began_at:.0f} s"
        print(f"  {hit.fault.kind} ({hit.victim}), {said}", flush=True)
        if hit.num_in_flight >= wanted:
            return True
    return False
