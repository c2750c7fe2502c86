"""Redis restarts with its append-only file, with a shortened one, and without any data."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import psutil

from tests.harness.audit import Audit
from tests.harness.fault_run import FaultRun, Recovery, Scene
from tests.harness.pool_state import wait_for
from tests.harness.streams import Outcome, StreamLoad

RESTART_LIMIT_S, SERVED_LIMIT_S = 5.0, 10.0
LONGEST_CUT_BYTES = 200_000
LONGEST_WAIT_S = 4.0


def redis_restart(run: FaultRun) -> None:
    """Stopped in order under load and started again from its append-only file: nothing is lost."""
    recovery, struck = Recovery("redis-restart", limit_s=RESTART_LIMIT_S), []
    with run.scene("redis-restart") as scene:
        with scene.load(run.options.streams) as load:
            for _ in _moments(scene, load):
                struck.append((load.in_flight, time.monotonic()))
                scene.injector.end(scene.pool.children("redis")[0], signal.SIGTERM)
                scene.settle(load)
        recovery.observe(struck)
        run.add_recovery(recovery)
        run.add_audit(scene.name, scene.audit(load), faults=len(struck))


def redis_truncated(run: FaultRun) -> None:
    """kill -9, and the file has lost its end: a text is exact, or breaks off with one error and no wrong token."""
    rng, num_cut = random.Random(run.options.seed), 0
    with run.scene("redis-truncated") as scene:
        with scene.load(run.options.streams) as load:
            for _ in _moments(scene, load):
                num_cut += _kill_and_cut(scene, rng.randint(1, LONGEST_CUT_BYTES))
                scene.settle(load)
        audit = _audit_losses(scene, load)
        run.add_audit(scene.name, audit, faults=run.options.redis_faults, cut_bytes=num_cut)


def redis_flushall(run: FaultRun) -> None:
    """All data goes: who is in flight gets one clear error, who comes then is served, and nothing is restarted."""
    flushed: list[tuple[list[Outcome], float]] = []
    recovery = Recovery("redis-flushall, new requests", limit_s=SERVED_LIMIT_S)
    with run.scene("redis-flushall") as scene:
        before = scene.pids
        with scene.load(run.options.streams) as load:
            for _ in _moments(scene, load):
                flushed.append((load.in_flight, time.monotonic()))
                scene.pool.client.flushall()
                wait_for("a served request", lambda: _first_served(load, flushed[-1][1]))
                scene.settle(load)
        audit = _audit_losses(scene, load)
        if scene.pids != before:
            audit.faults.append("processes were restarted")
        for flying, at in flushed:
            told = sum(bool(outcome.error) for outcome in flying)
            print(f"  {told} of {len(flying)} streams in flight ended in an error", flush=True)
            recovery.pauses.append(_first_served(load, at) or float("inf"))
        run.add_recovery(recovery)
        run.add_audit(scene.name, audit, faults=len(flushed))


def _moments(scene: Scene, load: StreamLoad) -> Iterator[int]:
    """A random moment with all streams in flight, once for each fault."""
    rng = random.Random(scene.run.options.seed)
    for place in range(scene.run.options.redis_faults):
        load.wait_in_flight(scene.run.options.streams)
        time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        load.wait_in_flight(scene.run.options.streams)
        yield place


def _kill_and_cut(scene: Scene, num_bytes: int) -> int:
    """kill -9 Redis and shorten its file before it is started again; by how much, in bytes.

    `pagewire up` stands still meanwhile, so that it does not start it too early.
    """
    supervisor = psutil.Process(scene.stack.process.pid)
    supervisor.suspend()
    try:
        scene.injector.end(scene.pool.children("redis")[0])
        folder = scene.stack.state_dir / "redis"
        (file,) = [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]  # Redis 7, Redis 6.2
        size = file.stat().st_size
        os.truncate(file, max(0, size - num_bytes))
        return size - file.stat().st_size
    finally:
        supervisor.resume()


def _audit_losses(scene: Scene, load: StreamLoad) -> Audit:
    """Every stream is exact, or a beginning of its text and one error; everything comes to rest."""
    audit = Audit()
    audit.check_idle(scene.pool)
    audit.check_streams(load.ended, _broke_off)
    kept = [outcome for outcome in load.ended if not outcome.error]
    times = Counter(record.request_id for record in scene.pool.usage())
    audit.faults += [f"usage of {name}: {count} records" for name, count in times.items() if count > 1]
    print(f"  {len(kept)} of {len(load.ended)} streams were complete", flush=True)
    return audit


def _broke_off(outcome: Outcome) -> bool:
    """One error, and no wrong or doubled token before it. An end may have been told before its usage was known."""
    wanted, is_whole = outcome.reference.text, outcome.text == outcome.reference.text
    is_sound = wanted.startswith(outcome.text) and outcome.reasons == (["length"] if is_whole else [])
    return outcome.error.startswith("ServerError") and (is_sound or (is_whole and not outcome.reasons))


def _first_served(load: StreamLoad, at: float) -> float | None:
    """Seconds from `at` to the first text of a stream that began after it."""
    later = [o.arrivals[0] for o in [*load.ended, *load.in_flight] if o.started_at > at and o.arrivals]
    return min(later) - at if later else None
