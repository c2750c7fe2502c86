"""What a crash report says: ids and the kind of error, never a prompt (BEST case 16)."""

import logging

import pytest

from services.gpu_worker.service.inbox import PlanEntry
from services.gpu_worker.service.incarnation import IncarnationFailed
from services.gpu_worker.service.lifecycle import ExitCode, is_out_of_memory, report_crash
from services.gpu_worker.service.roster import BatchRoster
from services.gpu_worker.service.seat import Seat
from shared.errors import ConfigError, ProtocolError
from shared.keys import Keys
from shared.messages import EndReason, NewRow, StepPlan, StepResult, Tick, encode
from shared.packing import pack_int32
from shared.sampling import SamplingParams

TICK = Tick(number=1, intake_id="0-0", log_id="0-0", now=0.0)


def new_row(row: int, request_id: str) -> NewRow:
    return NewRow(row, request_id, pack_int32([31337] * 5), 5, 0, SamplingParams(max_tokens=4, seed=1))


def failed_step(cause: Exception) -> IncarnationFailed:
    plan = StepPlan(plan_id=12, tick=TICK, added=(new_row(0, "req-a"), new_row(1, "req-b")))
    return IncarnationFailed(cause, Seat(Keys("t"), "worker-0", 3), PlanEntry(plan, encode(plan)), ("req-a", "req-b"))


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (MemoryError(), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), ExitCode.OUT_OF_MEMORY),
        (ProtocolError("row 3 is taken"), ExitCode.PROTOCOL),
        (RuntimeError("shapes"), ExitCode.FAILED),
    ],
)
def test_step_failure_names_requests_and_step(
    cause: Exception, code: ExitCode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        assert report_crash(failed_step(cause)) is code
    line = caplog.messages[-1]
    for part in ("worker=worker-0", "incarnation=3", "step=12", "requests=req-a,req-b", "plan_digest="):
        assert part in line
    assert "31337" not in caplog.text


def test_config_error_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        assert report_crash(ConfigError("no such model")) is ExitCode.CONFIG
    assert caplog.messages == ["error: no such model"]


def test_torch_reports_memory_exhaustion_in_a_known_way() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


def test_roster_follows_plans_and_results() -> None:
    roster = BatchRoster()
    roster.before(StepPlan(plan_id=1, tick=TICK, added=(new_row(0, "a"), new_row(1, "b"))))
    assert list(roster.request_ids) == ["a", "b"]
    roster.after(StepResult("w", 1, 1, ended=((0, EndReason.EOS),)))
    roster.before(StepPlan(plan_id=2, tick=TICK, dropped=(1,), added=(new_row(0, "c"),)))
    assert list(roster.request_ids) == ["c"]
