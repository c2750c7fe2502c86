"""The worker's service loop against a real Redis; the test is the scheduler's leader."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from services.gpu_worker.service import incarnation as incarnation_module
from services.gpu_worker.service import worker as worker_module
from services.gpu_worker.service.incarnation import IncarnationFailed
from services.gpu_worker.service.worker import ResettableEngine
from shared.errors import ProtocolError
from shared.messages import StepPlan, StepResult, WorkerState
from shared.packing import NO_TOKEN, unpack_int32
from shared.scripts import read_fence
from tests.harness.lossy_proxy import LossyProxy
from tests.integration.gpu_worker.conftest import wait_until

if TYPE_CHECKING:
    from tests.integration.gpu_worker.conftest import Leader, WorkerThread

Run = Callable[..., "WorkerThread"]


@pytest.fixture
def proxy(redis_url: str) -> Iterator[LossyProxy]:
    between = LossyProxy(redis_url)
    yield between
    between.close()


def tokens_of(results: list[StepResult], row: int = 0) -> list[int]:
    """The tokens that `row` yielded, in order."""
    columns = [unpack_int32(result.tokens) for result in results]
    return [column[row] for column in columns if row < len(column) and column[row] != NO_TOKEN]


def ids(results: list[StepResult]) -> list[int]:
    return [result.step_id for result in results]


def test_ready_worker_tells_its_capacity(leader: "Leader", run_worker: Run) -> None:
    run_worker()
    lease = leader.ready_worker()
    assert (lease.name, lease.instance, lease.progress) == ("worker-0", "first", 1.0)
    assert (lease.num_blocks, lease.block_size, lease.max_num_seqs, lease.max_model_len) == (256, 16, 8, 4096)
    assert (lease.num_cpu_blocks, lease.block_bytes) == (16, 2 * 2 * 2 * 8 * 16 * 4)
    assert "float32" in lease.fingerprint


def test_a_worker_that_is_not_admitted_says_so(
    leader: "Leader", run_worker: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose name was another's waited in silence: only the scheduler's log knew."""
    monkeypatch.setattr(worker_module, "ADMISSION_PATIENCE_S", 0.1)
    run_worker()
    wait_until(lambda: "worker-0: not admitted yet" in caplog.text)
    time.sleep(0.3)
    assert caplog.text.count("not admitted yet") == 1
    assert leader.admit() == 1


def test_every_plan_is_answered_once_and_in_order(leader: "Leader", run_worker: Run) -> None:
    run_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation, max_tokens=6)
    leader.decode(incarnation, 7)
    results = leader.await_results(incarnation, 8)
    assert ids(results) == list(range(1, 9))
    assert results[0].joined == ((0, "r", 0),)
    prefill, decode_base_s, decode_row_s, copy, _ = results[0].rates
    assert min(prefill, decode_base_s + decode_row_s, copy) > 0, "measured before the first plan came"
    assert len(tokens_of(results)) == 6, "the row ended at max_tokens; plans that came after yield nothing"
    assert [result.step_id for result in results if result.ended] == [6]


def test_the_lease_tells_where_the_steps_time_went(leader: "Leader", run_worker: Run) -> None:
    run_worker()
    incarnation = leader.admit()
    before = counted(leader)
    leader.start_request(incarnation, max_tokens=20)
    leader.decode(incarnation, 19)
    leader.await_results(incarnation, 20)

    def gained() -> dict[str, int]:
        return {part: count - before.get(part, 0) for part, count in counted(leader).items()}

    wait_until(lambda: gained().get("publish", 0) == 20, timeout_s=5.0, what="the profile in the lease")
    steps = dict.fromkeys(("input_build", "attention", "gemm", "sampling", "step", "publish"), 20)
    assert gained() == {**steps, "plan_wait": 19}, "nobody waits for the first plan: there was no row"
    seconds = {times.part: times.total_s for times in leader.ready_worker().step_times}
    parts = sum(seconds[part] for part in ("input_build", "attention", "gemm", "sampling"))
    assert 0 < parts <= seconds["step"]


def counted(leader: "Leader") -> dict[str, int]:
    """Observations of each part of a worker's turn."""
    return {times.part: sum(times.counts) for times in leader.ready_worker().step_times}


def test_plans_that_wait_in_the_stream_are_executed_from_the_first_on(leader: "Leader", run_worker: Run) -> None:
    incarnation = leader.fence("first")
    leader.start_request(incarnation)
    leader.decode(incarnation, 20)
    run_worker()
    results = leader.await_results(incarnation, 21)
    assert ids(results) == list(range(1, 22))
    assert len(tokens_of(results)) == 21


def test_steps_with_plans_ahead_are_read_in_few_reads(leader: "Leader", run_worker: Run) -> None:
    """Reading costs one command per turn, not per plan, and a published result costs one command."""
    incarnation = leader.fence("first")
    leader.start_request(incarnation)
    leader.decode(incarnation, 40)
    leader.client.config_resetstat()
    run_worker()
    leader.await_results(incarnation, 41)
    stats = leader.client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 41
    assert stats["cmdstat_xread"]["calls"] < 10


def test_lost_reply_is_sent_again_and_counts_once(leader: "Leader", proxy: LossyProxy, run_worker: Run) -> None:
    run_worker(proxy.url)
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    proxy.lose_reply(b"step:worker-0")
    leader.decode(incarnation, 5)
    leader.await_results(incarnation, 6)
    leader.decode(incarnation, 3)
    results = leader.await_results(incarnation, 9)
    assert proxy.num_lost == 1
    assert ids(results) == list(range(1, 10)), "each step once, in order"
    assert leader.ready_worker().instance == "first", "ALREADY is success: the worker was not fenced"


def test_outage_of_redis_is_outlived(leader: "Leader", proxy: LossyProxy, run_worker: Run) -> None:
    run_worker(proxy.url)
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    proxy.go_down()
    leader.decode(incarnation, 4)
    time.sleep(0.7)
    assert len(leader.results(incarnation)) < 5
    proxy.come_back()
    assert ids(leader.await_results(incarnation, 5)) == [1, 2, 3, 4, 5]
    assert leader.ready_worker().instance == "first"


def test_worker_waits_for_a_redis_that_comes_later(leader: "Leader", proxy: LossyProxy, run_worker: Run) -> None:
    proxy.go_down()
    worker = run_worker(proxy.url)
    time.sleep(0.3)
    assert worker.is_alive
    proxy.come_back()
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)


def test_late_result_of_a_fenced_incarnation_is_refused(leader: "Leader", run_worker: Run) -> None:
    worker = run_worker()
    old = leader.admit()
    leader.start_request(old)
    leader.decode(old, 3)
    before = leader.await_results(old, 4)
    leader.fence("")
    leader.decode(old, 1)  # a plan that was under way when the worker was fenced
    leader.ready_worker("first.1")
    assert leader.results(old) == before
    assert leader.fenced()[-1].incarnation == old
    assert read_fence(leader.client, leader.keys).workers["worker-0"].step == 0

    new = leader.admit("first.1")
    leader.start_request(new)  # row 0 again: the batch must be empty
    leader.decode(new, 3)
    after = leader.await_results(new, 4)
    assert ids(after) == [1, 2, 3, 4]
    assert tokens_of(after) == tokens_of(before), "the same prompt, computed afresh"
    assert worker.is_alive


class Hanging:
    """An engine whose step waits when it is told to."""

    def __init__(self, engine: ResettableEngine) -> None:
        self._engine = engine
        self.go_on = threading.Event()
        self.go_on.set()
        self.profile = engine.profile
        self.begin, self.reset = engine.begin, engine.reset

    def step(self, plan: StepPlan) -> StepResult:
        self.go_on.wait()
        return self._engine.step(plan)


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_that_runs_on_after_the_fence_is_refused_or_ends_the_process(
    leader: "Leader", run_worker: Run, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late: its result is refused and counted, the worker comes back. Never: only an end of the process helps."""
    monkeypatch.setattr(incarnation_module, "STUCK_S", 5.0 if ends else 0.3)
    worker = run_worker(wrap=Hanging)
    assert isinstance(worker.loaded.engine, Hanging)
    stuck = threading.Event()
    worker.worker.on_stuck = stuck.set
    old = leader.admit()
    leader.start_request(old)
    leader.await_results(old, 1)
    worker.loaded.engine.go_on.clear()
    leader.decode(old, 1)
    time.sleep(0.2)
    leader.fence("")
    if not ends:
        assert stuck.wait(5.0), "nobody was told"
    worker.loaded.engine.go_on.set()
    leader.ready_worker("first.1", timeout_s=5)
    assert stuck.is_set() is not ends
    assert ids(leader.results(old)) == [1]
    assert read_fence(leader.client, leader.keys).refused == {"worker-0": 1}


def test_idle_worker_notices_that_it_was_fenced(leader: "Leader", run_worker: Run) -> None:
    run_worker()
    leader.admit()
    time.sleep(0.2)
    leader.fence("")
    leader.ready_worker("first.1", timeout_s=5)
    assert [lease.instance for lease in leader.workers()] == ["first.1"], "the old lease is given back"


def test_worker_whose_steps_redis_forgot_registers_again(leader: "Leader", run_worker: Run) -> None:
    """Redis came back without its last second: steps that were acknowledged are gone."""
    run_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    leader.client.hset(leader.keys.fence, "step:worker-0", 0)
    leader.ready_worker("first.1", timeout_s=5)


def test_lapsed_lease_alone_changes_nothing(leader: "Leader", run_worker: Run) -> None:
    """A lease only detects; the fence decides."""
    run_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.client.delete(leader.keys.lease("gpu_worker:worker-0:first"))
    leader.decode(incarnation, 3)
    assert ids(leader.await_results(incarnation, 4)) == [1, 2, 3, 4]
    assert leader.ready_worker(timeout_s=2).instance == "first"


def test_a_draining_worker_serves_until_the_leader_lets_it_go(leader: "Leader", run_worker: Run) -> None:
    """An empty plan stream says nothing: the leader may be about to send the next plan."""
    worker = run_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    leader.decode(incarnation, 38)
    worker.worker.drain()
    leader.await_results(incarnation, 39)
    time.sleep(0.5)
    assert worker.is_alive
    leader.decode(incarnation, 20)
    leader.await_results(incarnation, 59)
    assert len(tokens_of(leader.results(incarnation))) == 59
    assert [lease.state for lease in leader.workers()] == [WorkerState.DRAINING]
    leader.fence("")
    worker.join(1.0)
    worker.worker.release()
    assert leader.workers() == [], "nobody has to wait for the lease to lapse"


def test_a_draining_worker_goes_when_nobody_leads(leader: "Leader", run_worker: Run) -> None:
    """The whole pool is being stopped. What is in its stream is still answered."""
    worker = run_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    leader.decode(incarnation, 58)
    leader.client.delete(leader.keys.leader_lease)
    worker.worker.drain()
    worker.join(3.0)
    assert len(tokens_of(leader.results(incarnation))) == 59


def test_a_draining_worker_does_not_wait_for_ever(leader: "Leader", run_worker: Run) -> None:
    worker = run_worker(drain_grace_s=0.6)
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    began = time.monotonic()
    worker.worker.drain()
    worker.join(3.0)
    assert time.monotonic() - began >= 0.6


def test_gap_in_the_plan_stream_is_fatal(leader: "Leader", run_worker: Run) -> None:
    worker = run_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.skip_plan(incarnation)
    leader.decode(incarnation, 1)
    worker.join()
    assert isinstance(worker.error, IncarnationFailed)
    assert isinstance(worker.error.cause, ProtocolError)
    assert str(worker.error.cause) == "plan 3 follows plan 1"
    assert ids(leader.results(incarnation)) == [1], "what was computed before is published"


@pytest.mark.parametrize("payload", [b"", b"\xc1 not msgpack"])
def test_entry_that_is_no_plan_is_fatal(leader: "Leader", run_worker: Run, payload: bytes) -> None:
    worker = run_worker()
    incarnation = leader.admit()
    leader.client.xadd(leader.keys.plans("worker-0", incarnation), {b"m": payload}, id="1-0")
    worker.join()
    assert isinstance(worker.error, IncarnationFailed)
    assert isinstance(worker.error.cause, ProtocolError)


def test_plan_that_the_engine_refuses_names_the_batch(leader: "Leader", run_worker: Run) -> None:
    worker = run_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation, "request-a")
    leader.send(incarnation, leader.plan(incarnation, chunks=[(7, 3)]))  # row 7 is empty
    worker.join()
    assert isinstance(worker.error, IncarnationFailed)
    assert isinstance(worker.error.cause, ProtocolError)
    assert worker.error.request_ids == ("request-a",)
    assert worker.error.step == 2
    assert ids(leader.results(incarnation)) == [1]


def test_lease_is_renewed_while_the_compute_thread_is_busy(leader: "Leader", run_worker: Run) -> None:
    rounds = 30
    incarnation = leader.fence("first")
    for number in range(rounds):
        leader.start_request(incarnation, f"r{number}", max_tokens=1, num_prompt=2000)
    run_worker()
    lease = leader.keys.lease("gpu_worker:worker-0:first")
    leader.await_results(incarnation, 1)
    left: list[int] = []
    started = time.monotonic()
    while len(leader.results(incarnation)) < rounds:
        left.append(leader.client.pttl(lease))
        time.sleep(0.02)
    assert time.monotonic() - started > 0.6, "too fast to show a renewal: more rounds"
    assert min(left) > 1000, "renewed every 500 ms of 2000 ms"
