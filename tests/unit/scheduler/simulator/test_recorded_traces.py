"""A recorded run as a trace."""

from pathlib import Path

import pytest

from services.scheduler.recording.recorder import Recorder
from services.scheduler.simulator import LatencyModel, WorkerSpec, simulate
from services.scheduler.simulator.generators import generate
from services.scheduler.simulator.recorded_traces import read_recording
from services.scheduler.simulator.trace import num_tokens, tokens_of
from tests.unit.scheduler.test_recording import CONFIG, record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record(Recorder(tmp_path / "recording", "pool"))
    return tmp_path / "recording"


def test_it_has_the_requests_that_came_with_what_they_said(folder: Path) -> None:
    original = generate("poisson:rate=20,prompt=20,output=15", requests=40)
    trace = read_recording(folder)
    assert [request.request_id for request in trace] == [request.request_id for request in original]
    for recorded, request in zip(trace, original, strict=True):
        assert recorded.prompt == tokens_of(request.prompt)
        assert recorded.output == tokens_of(request.output)
        assert recorded.limit == request.limit
    assert trace[0].arrival == 0.0
    gap = trace[-1].arrival - (original[-1].arrival - original[0].arrival)
    assert abs(gap) < 0.5, "a request is seen when the leader takes it in"


def test_it_can_be_simulated_under_another_configuration(folder: Path) -> None:
    trace = read_recording(folder)
    report = simulate(CONFIG, [WorkerSpec(name="w", num_blocks=500)], trace, LatencyModel(base_s=0.01))
    assert report.finished["stop"] + report.finished["length"] == 40 and report.num_preemptions == 0
    assert report.num_output_tokens == sum(num_tokens(request.output) for request in trace)
