"""What a pool really did is recorded, and derived again byte for byte, though a worker and a scheduler were killed."""

import stat
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest

from services.scheduler.recording.format import decode_plan
from services.scheduler.recording.reader import open_recording
from services.scheduler.recording.recorder import Recorder
from services.scheduler.recording.verify import replay_file, verify
from services.scheduler.service.position import decode_snapshot
from shared.messages import CopyKind, EventKind, WorkerFenced
from shared.scripts import read_fence
from tests.integration.scheduler.conftest import Pool, Process, wait_for

SPLIT_FILES = 200_000
"""Bytes of a file, so that this run fills several."""


@dataclass(frozen=True)
class Recorded:
    """A run's recording, and which ticks it may lack."""

    folder: Path
    gaps: list[tuple[int, int]]
    """From the last tick that the killed leader had written to the snapshot with which its successor began."""


@pytest.fixture
def recorded(pool: Pool, started: Callable[..., Process], tmp_path: Path) -> Recorded:
    """200 requests on two workers with little memory; one worker dies, and so does a scheduler, by kill -9."""
    folder = tmp_path / "recording"
    options = {"record": folder, "record_file_bytes": SPLIT_FILES, "lease_ttl_s": 0.4, "snapshot_interval_s": 0.3}
    options["preemption"] = "swap"
    sizes = [{"num_blocks": 40, "num_cpu_blocks": 60}, {"num_blocks": 32}]
    workers = [pool.worker(f"worker-{index}", step_s=0.001, **size) for index, size in enumerate(sizes)]
    first = started("first", **options)
    wait_for(lambda: read_fence(pool.client, pool.keys).epoch == 1 and first.has_said("worker_joined"))
    prefix = [1 + position % 20 for position in range(9)]
    pool.submit(120, max_prompt=30, max_tokens=60, prefix=prefix)
    wait_for(lambda: len(workers[0].statuses) > 60)
    workers[1].kill()
    wait_for(lambda: len(workers[0].statuses) > 150)
    # A leader waits for no disk: what its thread has not written when it is killed is gone, unless the successor, which
    # begins at the snapshot, derives it again. Killed while its files reach beyond its snapshot it loses nothing;
    # should the next snapshot come before the signal, it loses exactly the ticks up to there that are in no file.
    wait_for(lambda: _last_written(folder) >= _snapshot_tick(pool) > 1)
    first.process.kill()
    first.process.wait()
    written, snapshot = _last_written(folder), _snapshot_tick(pool)
    second = started("second", **options)
    pool.submit(80, max_prompt=30, max_tokens=60)
    pool.worker("worker-1", num_blocks=32)
    pool.wait_until_ended(120)
    pool.check_texts()
    second.process.terminate()
    assert second.process.wait(20) == 0
    assert second.has_said("ticks_replayed") and not second.has_said("cold_start")
    return Recorded(folder, [(written + 1, snapshot)] if snapshot > written else [])


def _snapshot_tick(pool: Pool) -> int:
    data: Any = pool.client.get(pool.keys.snapshot)
    return decode_snapshot(data).tick if data else 0


def _last_written(folder: Path) -> int:
    return max((tick.tick.number for file in open_recording(folder) for tick in file.ticks()), default=0)


def test_a_recorded_run_with_preemptions_and_kills_replays_to_the_same_bytes(recorded: Recorded, pool: Pool) -> None:
    files = open_recording(recorded.folder)
    causes = [file.header.cause for file in files]
    assert causes[0] == "cold_start" and "takeover" in causes and "rotation" in causes
    verdict = verify(files)
    assert verdict.difference is None and not verdict.cut
    assert verdict.gaps == recorded.gaps
    assert verdict.is_closed and verdict.last_tick == read_fence(pool.client, pool.keys).tick
    lost = sum(last - first + 1 for first, last in recorded.gaps)
    assert verdict.num_ticks == verdict.last_tick - files[0].header.tick - lost, "every committed tick is there"
    events = {}
    fenced, requests, copies, num_requeues = set(), set(), set(), 0
    for file in files:
        for step in replay_file(file):
            record = step.record
            requests |= {submission.request_id for submission in record.submissions}
            fenced |= {(m.worker, m.incarnation) for m in record.log if isinstance(m, WorkerFenced)}
            num_requeues = max(num_requeues, step.core.counters.requeues)
            plan = decode_plan(record)
            copies |= {copy.kind for copy in plan.copies} if plan else set()
            events.update({(record.tick.number, event.request_id): event for event in record.events})
    kinds = [event.kind for event in events.values()]
    assert len(requests) == 200 and kinds.count(EventKind.FINISHED) == 200
    assert kinds.count(EventKind.PREEMPTED) > 0, "nobody was preempted"
    assert {CopyKind.OUT, CopyKind.IN} <= copies, "nobody was swapped"
    assert ("worker-1", 1) in fenced and num_requeues > 0, "no worker died with requests"
    assert str(verdict).startswith(f"{verdict.num_ticks} ticks, {verdict.num_plans} plans: byte-identical")
    assert verdict.num_plans > 100
    _judge_files(recorded.folder)
    _judge_alteration(recorded.folder)


def _judge_files(folder: Path) -> None:
    """Only their owner reads them, and so does anybody's msgpack."""
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with path.open("rb") as stream:
            tags = [message[0] for message in msgpack.Unpacker(stream, max_buffer_size=2**30)]
        assert tags[0] == "recording/1" and set(tags[1:]) <= {"recorded-tick/1", "recorded-end/1"}


def _judge_alteration(folder: Path) -> None:
    """One byte of one plan is another: the tick and the field are named."""
    file = next(file for file in open_recording(folder) if file.header.cause == "takeover")
    found = [(step.record, plan) for step in replay_file(file) if (plan := decode_plan(step.record)) and plan.blocks]
    record, plan = found[3]
    data, payload = file.path.read_bytes(), bytes(record.plan)
    at = data.index(payload) + payload.index(plan.blocks) + 4
    file.path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    difference = verify(open_recording(folder)).difference
    assert difference is not None
    assert (difference.tick, difference.field) == (record.tick.number, "plan.blocks")
    file.path.write_bytes(data)


def test_recording_costs_the_leader_little(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook only hands over; encoding and writing are another thread's."""
    spent = []
    on_tick = Recorder.on_tick

    def timed(self: Recorder, *given: Any) -> None:
        began = time.thread_time()
        on_tick(self, *given)
        spent.append(time.thread_time() - began)

    monkeypatch.setattr(Recorder, "on_tick", timed)
    pool.worker()
    leader = pool.scheduler(record=str(tmp_path / "recording")).take_over()
    pool.submit(20, max_tokens=60)
    while not all(pool.has_ended(request_id) for request_id in pool.submissions):
        leader.turn(0.05)
    assert len(spent) > 50
    assert statistics.median(spent) < 20e-6
