"""An in-process engine: the same worker's engine and the same scheduler core in one process, with no log between them.

`python -m benchmarks.engine_step.in_process` is such a process; `PAGEWIRE_…` variables tell it what they tell a
worker. It answers every line on stdin, `{"concurrency": …, "prompts": [[…], …], "output_tokens": …}`, by one on stdout.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from services.gpu_worker.service.partition import apply_partition, plan_partition, thread_environment
from services.gpu_worker.settings import Settings
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.settings import Settings as SchedulerSettings
from shared.messages import StepPlan, Submission, WorkerJoined
from shared.model_store import resolve
from shared.packing import pack_int32
from shared.sampling import SamplingParams


def submission(index: int, prompt: Sequence[int], output_tokens: int) -> Submission:
    """Greedy, to the full length."""
    params = SamplingParams(max_tokens=output_tokens, seed=0, temperature=0.0, ignore_eos=True)
    return Submission(f"request-{index}", "m", "completion", 0.0, pack_int32(prompt), params)


def run_load(engine: Any, core: SchedulerCore, load: Mapping[str, Any]) -> dict[str, float]:
    """Keep `concurrency` requests running until every prompt is answered; output tokens and seconds."""
    waiting = deque(load["prompts"])
    plans: deque[StepPlan] = deque()
    live = num_tokens = num_steps = index = 0
    started = time.perf_counter()
    while waiting or live:
        while waiting and live < load["concurrency"]:
            core.add_request(submission(index, waiting.popleft(), load["output_tokens"]))
            live, index = live + 1, index + 1
        while (scheduled := core.schedule(time.perf_counter())) is not None:
            plans.append(scheduled.plan)
        core.update_from_result(engine.step(plans.popleft()))
        num_steps += 1
        for finished in core.take_finished():
            live, num_tokens = live - 1, num_tokens + finished.final.num_output_tokens
        core.take_events()
    seconds = time.perf_counter() - started
    while plans:  # what was planned ahead of the last end
        core.update_from_result(engine.step(plans.popleft()))
    core.ended_ids.clear()
    return {"output_tokens": num_tokens, "seconds": seconds, "steps": num_steps}


def serve() -> None:
    """Load the model as a worker does, then answer line by line."""
    settings = Settings()
    partition = plan_partition(settings.worker_index, settings.num_workers)
    apply_partition(partition)
    os.environ.update(thread_environment(partition))
    os.nice(settings.compute_niceness)
    from services.gpu_worker.service.loading import load_worker

    loaded = load_worker(settings, resolve(settings.model, settings.home), partition, lambda share: None)
    engine: Any = loaded.engine
    capacity = loaded.capacity
    config = SchedulerConfig(
        max_model_len=capacity.max_model_len,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        itl_target_s=SchedulerSettings.model_fields["itl_target_s"].default,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        engine.begin("worker-0", 1)
        core = SchedulerCore(config)
        core.on_worker_joined(WorkerJoined("worker-0", 1, capacity.num_blocks))
        print(json.dumps(run_load(engine, core, json.loads(line))), flush=True)


class InProcess:
    """The running child."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, concurrency: int, prompts: Sequence[Sequence[int]], output_tokens: int) -> dict[str, float]:
        """One load; see `run_load`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        load = {"concurrency": concurrency, "prompts": prompts, "output_tokens": output_tokens}
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def in_process(settings: Mapping[str, object]) -> Iterator[InProcess]:
    """A child with a worker's `settings` while the block runs; it sleeps between loads."""
    environment = {f"PAGEWIRE_{name.upper()}": str(value) for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engine_step.in_process"],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the in-process engine ended with {process.wait()}")
        yield InProcess(process)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve()
