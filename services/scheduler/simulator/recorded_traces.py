"""A recording as a trace: the requests that really came, when they came, with the tokens that they really had."""

from pathlib import Path

from services.scheduler.recording.format import RecordingError
from services.scheduler.recording.reader import open_recording
from services.scheduler.recording.verify import replay_file
from services.scheduler.simulator.trace import Trace, TraceRequest
from services.scheduler.simulator.trace_files import from_start
from shared.messages import Abort, Submission
from shared.packing import pack_int32

SILENT = pack_int32([0])
"""Stands for the output of requests that had none."""


def read_recording(folder: Path) -> Trace:
    """All requests of a recording, by arrival. Those that were still running say what was committed by then.

    Raises:
        RecordingError: it is damaged, of another version, or holds no request.
    """
    arrivals: dict[str, tuple[float, Submission]] = {}
    outputs: dict[str, bytes] = {}
    aborts: dict[str, float] = {}
    for file in open_recording(folder):
        for submission in file.header.submissions:
            arrivals.setdefault(submission.request_id, (submission.created or file.header.now, submission))
        core = None
        for step in replay_file(file):
            core, record = step.core, step.record
            for submission in record.submissions:
                arrivals.setdefault(submission.request_id, (submission.created or record.tick.now, submission))
            aborts.update((m.request_id, record.tick.now) for m in record.intake if isinstance(m, Abort))
            outputs.update((ended.request_id, ended.output) for ended in record.ended)
        outputs.update((live.request_id, live.output) for live in (core.live_outputs() if core else ()))
    requests = [
        _request(submission, arrival, outputs.get(request_id) or SILENT, aborts.get(request_id, 0.0))
        for request_id, (arrival, submission) in arrivals.items()
    ]
    if not requests:
        raise RecordingError(f"{folder} holds no request")
    return from_start(sorted(requests, key=lambda request: request.arrival))


def _request(submission: Submission, arrival: float, output: bytes, aborted: float) -> TraceRequest:
    return TraceRequest(
        request_id=submission.request_id,
        arrival=arrival,
        prompt=submission.prompt_tokens,
        output=output,
        max_tokens=max(submission.params.max_tokens, len(output) // 4),
        tenant=submission.tenant,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        group=submission.group,
        abort_at=max(0.0, aborted - arrival) if aborted else 0.0,
    )
