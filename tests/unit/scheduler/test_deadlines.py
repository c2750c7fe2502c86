"""What is remembered of deadlines is bounded by the requests that live, not by those that have come."""

import msgspec

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service.deadlines import SLACK, Deadlines
from tests.fakes.scheduler_world import make_submission


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    core = SchedulerCore(SchedulerConfig(max_model_len=64))
    deadlines = Deadlines()
    for index in range(3 * SLACK):
        submission = make_submission(f"r{index}", [1, 2, 3], max_tokens=4)
        submission = msgspec.structs.replace(submission, created=1.0, deadlines=(60.0, 60.0, 3600.0))
        deadlines.add([submission])
        core.add_request(submission)
        if index:
            core.abort_request(submission.request_id, "client_disconnect")
        deadlines.forget_ended(core)
    assert len(deadlines._due) <= SLACK + 2 * 3
    assert [abort.request_id for abort in deadlines.take(core, 100.0)] == ["r0", "r0"]
