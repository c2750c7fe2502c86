"""A recording's gaps, limits and damages. Whole runs are in tests/integration/scheduler/test_recording.py."""

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.recording import recorder as recorder_module
from services.scheduler.recording.format import End, RecordingError, decode_plan
from services.scheduler.recording.life import explain_request
from services.scheduler.recording.reader import open_recording
from services.scheduler.recording.recorder import Recorder, RecorderLimits
from services.scheduler.recording.step import explain_step
from services.scheduler.recording.verify import verify
from services.scheduler.simulator import Report, WorkerChange, WorkerSpec, simulate
from services.scheduler.simulator.generators import generate
from shared.errors import ConfigError
from shared.messages import EventKind, encode

CONFIG = SchedulerConfig(max_model_len=200, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)


def record(
    recorder: Recorder,
    *,
    commit_every: int = 3,
    requests: int = 40,
    write: bool = False,
    changes: Sequence[WorkerChange] = (),
) -> Report:
    """A simulated run into `recorder`; with `write` its thread is done with each commit before the next tick."""
    begun: list[bool] = []
    numbers = count(1)

    def on_tick(core: Any, tick: Any, *given: Any) -> None:
        if not begun:
            begun.append(True)
            recorder.begin(core, epoch=1, tick=tick.number, now=tick.now, cause="cold_start")
            return  # the core has this tick already
        recorder.on_tick(core, tick, *given)
        if next(numbers) % commit_every == 0:
            recorder.on_commit()
            if write:
                recorder._write()

    trace = generate("poisson:rate=20,prompt=20,output=15", requests=requests)
    workers = [WorkerSpec(name=name, num_blocks=60) for name in ("w", "v")[: 1 + bool(changes)]]
    report = simulate(CONFIG, workers, trace, on_tick=on_tick, changes=changes)
    recorder.on_commit()
    recorder.close()
    return report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_recording_replays(folder: Path) -> None:
    report = record(Recorder(folder, "pool"))
    verdict = verify(open_recording(folder))
    assert report.num_preemptions > 0
    assert verdict.difference is None and verdict.num_plans >= report.num_plans - 1
    assert verdict.is_complete and str(verdict).endswith("plans: byte-identical")


def test_what_was_not_committed_is_not_recorded(folder: Path) -> None:
    recorder = Recorder(folder, "pool")
    on_commit, recorder.on_commit = recorder.on_commit, lambda **_: None  # type: ignore[method-assign]
    record(recorder)
    recorder.discard()
    on_commit()
    recorder._write()
    assert not list(folder.iterdir())


def test_large_files_are_followed_and_the_oldest_forgotten(folder: Path) -> None:
    recorder = Recorder(
        folder, "pool", RecorderLimits(file=20_000, folder=100_000), wall=count(1).__next__, interval_s=9
    )
    record(recorder, requests=150, write=True)
    files = open_recording(folder)
    assert len(files) > 2 and {file.header.cause for file in files} == {"rotation"}
    assert sum(file.path.stat().st_size for file in files[:-1]) <= 100_000
    verdict = verify(files)
    assert verdict.difference is None and not verdict.gaps and verdict.num_plans > 20


def test_a_thread_that_falls_behind_leaves_a_gap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_BACKLOG", 40)
    recorder = Recorder(folder, "pool", interval_s=9)
    numbers, on_commit = count(1), recorder.on_commit

    def slowly(**options: Any) -> None:
        on_commit(**options)
        if next(numbers) % 40 == 0:
            recorder._write()

    recorder.on_commit = slowly  # type: ignore[method-assign]
    record(recorder)
    verdict = verify(open_recording(folder))
    assert recorder.num_lost > 0 and verdict.difference is None
    lost_inside = sum(last - first + 1 for first, last in verdict.gaps)
    assert lost_inside and (
        lost_inside == recorder.num_lost if not verdict.lost_from else lost_inside < recorder.num_lost
    )
    assert any(file.header.cause == "gap" for file in open_recording(folder))


def test_a_full_disk_leaves_a_gap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses for a while: neither leader nor thread ends, and the next file begins with the whole state."""
    monkeypatch.setattr(recorder_module, "RETRY_S", 0.0)
    recorder = Recorder(folder, "pool", wall=lambda: 0.0, interval_s=9)
    numbers, append = count(), recorder._append

    def refusing(batch: list[bytes]) -> bool:
        if 10 <= next(numbers) <= 12 and recorder._file is not None:
            recorder._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return False
        return append(batch)

    monkeypatch.setattr(recorder, "_append", refusing)
    record(recorder, write=True)
    verdict = verify(open_recording(folder))
    assert verdict.difference is None and verdict.gaps
    assert any(file.header.cause == "gap" for file in open_recording(folder))


def test_a_disk_that_stays_full_collects_no_empty_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "RETRY_S", 0.0)
    recorder = Recorder(folder, "pool", wall=lambda: 0.0, interval_s=9)
    numbers, append = count(), recorder._append

    def refusing(batch: list[bytes]) -> bool:
        if next(numbers) >= 10 and recorder._file is not None:
            recorder._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return False
        return append(batch)

    monkeypatch.setattr(recorder, "_append", refusing)
    record(recorder, write=True)
    assert recorder.num_lost > 0
    assert only_file(folder).stat().st_size > 0
    verdict = verify(open_recording(folder))
    assert verdict.difference is None and not verdict.cut and not verdict.gaps, "what is there shows no gap"
    assert not verdict.is_complete and str(verdict).endswith(
        "byte-identical, as far as they are recorded: the recording is incomplete"
    )
    done = CliRunner().invoke(app, ["replay", str(folder)])
    assert f"gap: the recording was not closed after tick {verdict.last_tick}: " in done.stderr
    assert done.stdout == f"{verdict}\n"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="recordings cannot be written"):
        Recorder(tmp_path / "file" / "below", "pool")


def test_a_file_that_is_cut_replays_up_to_there(folder: Path) -> None:
    record(Recorder(folder, "pool"))
    whole = verify(open_recording(folder)).num_ticks
    file = only_file(folder)
    file.write_bytes(file.read_bytes()[: -len(encode(End())) - 7])
    verdict = verify(open_recording(folder))
    assert verdict.num_ticks == whole - 1 and verdict.cut == [file.name] and not verdict.is_complete


@pytest.mark.parametrize("damage", ["no MessagePack", "another message", "a missing tick"])
def test_damage_is_named(folder: Path, damage: str) -> None:
    record(Recorder(folder, "pool"))
    file = only_file(folder)
    data = file.read_bytes()
    bounds = list(_bounds(file))
    start, end = bounds[5]
    if damage == "no MessagePack":
        altered, words = (
            data[:start] + b"\xc1" + data[start + 1 :],
            r"damaged behind tick \d+, byte \d+: no MessagePack",
        )
    elif damage == "another message":
        altered, words = data[:start] + b"\x01" + data[end:], r"tick \d+ is damaged, byte \d+"
    else:
        altered, words = data[:start] + data[end:], r"byte \d+ has tick \d+ instead of \d+"
    file.write_bytes(altered)
    with pytest.raises(RecordingError, match=words) as caught:
        verify(open_recording(folder))
    assert "\n" not in str(caught.value)


def _bounds(file: Path) -> Iterator[tuple[int, int]]:
    from services.scheduler.recording.reader import _messages

    for start, message in _messages(file):
        yield start, start + len(message)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "holds no recording"), (b"\xc1", "is no recording"), (b"\x01", "is no recording")]
)
def test_what_is_no_recording(folder: Path, content: bytes | None, words: str) -> None:
    with pytest.raises(RecordingError, match="is no folder"):
        open_recording(folder)
    folder.mkdir()
    if content is not None:
        (folder / "1.msgpack").write_bytes(content)
    with pytest.raises(RecordingError, match=words):
        open_recording(folder)


def test_an_altered_input_changes_the_plan(folder: Path) -> None:
    """A recorded prompt of another length: the first plan that differs is named, with both values."""
    record(Recorder(folder, "pool"))
    file = only_file(folder)
    data = file.read_bytes()
    files = open_recording(folder)
    ticks = list(files[0].ticks())
    tick = next(tick for tick in ticks if tick.submissions)
    prompt = tick.submissions[0].prompt_tokens
    at = data.index(prompt)
    file.write_bytes(data[:at] + b"\x07\x00\x00\x00" + data[at + 4 :])
    difference = verify(open_recording(folder)).difference
    assert difference is not None and difference.tick >= tick.tick.number
    assert difference.field.startswith("plan.added") and difference.recorded != difference.derived


def test_a_requests_life_is_told(folder: Path) -> None:
    """Of one that was preempted and of one whose worker died: every admission, every wait with its reason, the end."""
    record(Recorder(folder, "pool"), requests=60, changes=[WorkerChange(at=2.0, action="kill", worker="v")])
    lives = {f"r{number}": list(explain_request(open_recording(folder), f"r{number}")) for number in range(60)}
    for life in lives.values():
        assert "prompt tokens" in life[0] and "finished: " in life[-1]
        assert sum("admitted on" in line for line in life) == 1 + sum(
            "preempted on" in line or "is lost" in line for line in life
        )
    lines = [line for life in lives.values() for line in life]
    assert any("preempted on w, row" in line and "its worker's blocks go to r" in line for line in lines)
    assert any("v, row" in line and "is lost: it waits again" in line for line in lines)
    assert any("waits (blocks): needs a row" in line for line in lines)
    assert any("waits (behind): r" in line for line in lines)
    with pytest.raises(RecordingError, match="knows no request 'r99'"):
        list(explain_request(open_recording(folder), "r99"))


def test_a_step_is_told(folder: Path) -> None:
    record(Recorder(folder, "pool"))
    files = open_recording(folder)
    steps = {record.tick.number: record for record in files[0].ticks()}
    preempting = next(record for record in steps.values() if any(e.kind is EventKind.PREEMPTED for e in record.events))
    plan = decode_plan(preempting)
    assert plan is not None
    text = "\n".join(explain_step(files, str(preempting.tick.number)))
    assert f"plan: step {plan.plan_id} of w/1: " in text and "is preempted: blocks" in text
    assert f"row {plan.dropped[0]}: {preempting.events[0].request_id} is dropped" in text
    assert "waits: r" in text
    assert text == "\n".join(explain_step(files, f"w/{plan.plan_id}"))
    admitting = next(record for record in steps.values() if (made := decode_plan(record)) and made.added)
    text = "\n".join(explain_step(files, str(admitting.tick.number)))
    assert "is admitted: " in text and "computed now" in text
    with pytest.raises(RecordingError, match=r"no step 99999; its ticks are \d+ to \d+"):
        list(explain_step(files, "99999"))
    with pytest.raises(ConfigError, match="WORKER/STEP"):
        list(explain_step(files, "w/x"))


def test_the_command_answers_by_exit_code(folder: Path) -> None:
    record(Recorder(folder, "pool"))

    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["replay", str(folder), *arguments])
        return done.exit_code, done.stdout, done.stderr

    code, text, _ = run()
    assert code == 0 and text.endswith("plans: byte-identical\n")
    assert run("--step", "40")[0] == 0 and "admitted on" in run("--request", "r3")[1]
    code, text, error = run("--request", "nobody")
    assert code == 1 and not text and error == "error: the recording knows no request 'nobody'\n"
    file = only_file(folder)
    ticks = [tick for tick in open_recording(folder)[0].ticks() if (plan := decode_plan(tick)) and plan.chunks]
    plan_bytes, data = bytes(ticks[4].plan), file.read_bytes()
    at = data.index(plan_bytes) + len(plan_bytes) - 4  # the size of the last chunk, or what comes behind it
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    code, text, error = run()
    assert code == 1 and f"tick {ticks[4].tick.number}" in text + error and (text + error).count("\n") == 1
