"""`python -m services.gpu_worker`: signals, exit codes, crash reports."""

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kernels.native.library import current
from shared.messages import WorkerState

if TYPE_CHECKING:
    from tests.integration.gpu_worker.conftest import Leader, WorkerProcess

Start = Callable[..., "WorkerProcess"]


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.005)


def test_sigterm_drains(leader: "Leader", start_worker: Start) -> None:
    worker = start_worker()
    wait_for(leader.workers, "registered")
    assert leader.workers()[0].state is WorkerState.LOADING, "the lease is there before the model"
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    leader.decode(incarnation, 58)
    worker.process.terminate()
    leader.await_results(incarnation, 59)
    leader.fence("")
    assert worker.process.wait(3) == 0
    assert [result.step_id for result in leader.results(incarnation)] == list(range(1, 60))
    assert leader.workers() == [], "nobody has to wait for the lease to lapse"
    assert "SIGTERM: draining" in worker.text


@pytest.mark.skipif(current() is None, reason="no C++ kernels")
def test_an_int8_cache_is_told_in_the_lease_and_computes(leader: "Leader", start_worker: Start) -> None:
    """The same memory holds almost four times the blocks of float32."""
    start_worker(kv_cache_dtype="int8", num_blocks=0, kv_cache_memory=1 << 20)
    lease = leader.ready_worker()
    assert "-kv:int8-" in lease.fingerprint
    assert lease.block_bytes == 2 * 2 * 2 * (8 + 2) * 16
    assert lease.num_blocks == (1 << 20) // lease.block_bytes
    incarnation = leader.admit()
    leader.start_request(incarnation, max_tokens=6)
    leader.decode(incarnation, 5)
    results = leader.await_results(incarnation, 6)
    assert [result.step_id for result in results if result.ended] == [6]


def test_a_second_signal_ends_at_once(leader: "Leader", start_worker: Start) -> None:
    worker = start_worker()
    incarnation = leader.admit()
    leader.start_request(incarnation)
    leader.await_results(incarnation, 1)
    worker.process.terminate()
    wait_for(lambda: leader.workers()[0].state is WorkerState.DRAINING, "draining")
    assert worker.process.poll() is None
    worker.process.terminate()
    assert worker.process.wait(2) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_loading_ends_at_once(leader: "Leader", start_worker: Start, number: signal.Signals) -> None:
    worker = start_worker()
    wait_for(leader.workers, "registered")
    worker.process.send_signal(number)
    assert worker.process.wait(5) == 0
    assert leader.workers() == []


def test_signal_while_waiting_for_a_seat_ends_at_once(leader: "Leader", start_worker: Start) -> None:
    worker = start_worker()
    leader.ready_worker()
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(5) == 0
    assert leader.workers() == []


def test_memory_exhaustion_in_a_step_names_the_requests(leader: "Leader", start_worker: Start) -> None:
    """The limit is put on the running process, so that the next large tensor does not fit."""
    worker = start_worker(max_num_batched_tokens=4096, num_blocks=256)
    incarnation = leader.admit()
    leader.start_request(incarnation, "small", max_tokens=1)
    leader.await_results(incarnation, 1)
    with open(f"/proc/{worker.process.pid}/status") as status:
        written = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    limit = written + (2 << 20)
    resource.prlimit(worker.process.pid, resource.RLIMIT_DATA, (limit, limit))
    leader.start_request(incarnation, "big", num_prompt=4000)
    assert worker.process.wait(20) == 4
    crash = worker.text.splitlines()[-1]
    assert "step=2 " in crash
    assert "requests=big " in crash
    assert "plan_digest=" in crash
    assert "kind=out_of_memory" in crash
    assert leader.workers() == []


def test_two_workers_of_one_machine_share_its_cores(leader: "Leader", start_worker: Start) -> None:
    workers = [start_worker(name=f"worker-{i}", instance=f"w{i}", worker_index=i, num_workers=2) for i in range(2)]
    wait_for(lambda: len(leader.workers()) == 2, "both registered")
    cores = [os.sched_getaffinity(worker.process.pid) for worker in workers]
    if len(os.sched_getaffinity(0)) >= 2:
        assert not cores[0] & cores[1]
    assert cores[0] | cores[1] <= os.sched_getaffinity(0)


def test_unknown_model_is_a_clear_exit(leader: "Leader", start_worker: Start) -> None:
    worker = start_worker(model="no-such-model")
    assert worker.process.wait(20) == 2
    assert worker.text.splitlines()[-1].endswith("and no hub name of the form org/model")
    assert leader.workers() == []


def test_a_host_pool_without_room_is_a_clear_exit(leader: "Leader", start_worker: Start) -> None:
    worker = start_worker(swap_space=1e9)
    assert worker.process.wait(20) == 2
    assert "a host pool of" in worker.text.splitlines()[-1]
    assert leader.workers() == []


def test_a_cache_that_no_kernel_reads_is_a_clear_exit(leader: "Leader", start_worker: Start) -> None:
    worker = start_worker(kv_cache_dtype="fp8")
    assert worker.process.wait(20) == 2
    assert "kv_cache_dtype fp8 is for GPUs" in worker.text.splitlines()[-1]
    assert leader.workers() == []


def test_bad_setting_is_a_clear_exit(start_worker: Start) -> None:
    worker = start_worker(block_size=0)
    assert worker.process.wait(20) == 2
    assert "block_size" in worker.text
