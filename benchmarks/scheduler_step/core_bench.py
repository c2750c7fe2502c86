"""The pure core with workers that cost nothing: what `schedule()` and `update_from_result()` take."""

import gc
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from benchmarks.report import Times, Value
from benchmarks.scheduler_step.array_worker import ArrayWorker
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.outcomes import ScheduledPlan
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import num_changed_blocks, save_changed_blocks, save_core, take_snapshot
from shared.messages import StepResult, Submission, WorkerJoined, encode
from shared.packing import pack_int32
from shared.sampling import SamplingParams

FOREVER = 100_000
"""`max_tokens` of requests that outlive the measurement."""
NUM_PROMPT_TOKENS = 2_000
VLLM_US: Mapping[int, float] = {16: 198, 64: 786, 256: 3_320, 1024: 17_536}
"""vLLM 0.32's scheduler by running requests, mean µs of `schedule()` + `update_from_output()` on 2 cores."""


def submission(index: int, num_tokens: int = 0, max_tokens: int = FOREVER) -> Submission:
    """A prompt that begins like no other; without `num_tokens`, of a length that staggers block boundaries."""
    prompt = pack_int32([index, *range(1, num_tokens or 2 + (index * 37) % 160)])
    return Submission(f"request-{index}", "m", "completion", 0.0, prompt, SamplingParams(max_tokens=max_tokens, seed=0))


class CoreBench:
    """A core and its workers, each with `num_rows` rows; results wait in `answers`, oldest first."""

    def __init__(self, num_rows: int, num_workers: int = 1, num_blocks: int = 0, **options: Any) -> None:
        limits: dict[str, Any] = {
            "max_model_len": 200_000,
            "max_num_seqs": num_rows,
            "max_num_batched_tokens": num_rows + 4096,
        }
        self.core = SchedulerCore(SchedulerConfig(**(limits | options)))
        self.workers = {f"w{number}": ArrayWorker(f"w{number}", 1, num_rows) for number in range(num_workers)}
        for name in self.workers:
            self.core.on_worker_joined(WorkerJoined(name, 1, num_blocks or 400 * num_rows + 20_000))
        self.answers: deque[StepResult] = deque()

    def plan(self) -> ScheduledPlan | None:
        """Make a plan and carry it out."""
        scheduled = self.core.schedule(0.0)
        if scheduled is not None:
            self.answers.append(self.workers[scheduled.worker].step(scheduled.plan))
        return scheduled

    def answer(self) -> None:
        """The core takes the oldest result."""
        self.core.update_from_result(self.answers.popleft())

    def settle(self) -> None:
        """Until everything decodes and every worker has its plans."""
        while True:
            while self.plan() is not None:
                pass
            if not len(self.core.waiting) and not any(lane.prefill for lane in self.core.lanes.values()):
                return
            self.answer()

    def check(self) -> None:
        """What was measured was sound."""
        self.core.check_integrity()
        assert not self.core.broken_workers()
        assert not self.core.counters.ignored


def measure_steady(num_rows: int, num_steps: int, **options: Any) -> dict[str, Value]:
    """One worker whose rows all decode, boundaries staggered: a result is taken, a plan is made."""
    bench = CoreBench(num_rows, **options)
    for index in range(num_rows):
        bench.core.add_request(submission(index))
    bench.settle()
    seconds, sizes, cpu = [], [], 0.0
    gc.collect()
    for _ in range(num_steps):
        result = bench.answers.popleft()
        start, begun = time.perf_counter(), time.thread_time()
        bench.core.update_from_result(result)
        scheduled = bench.core.schedule(0.0)
        cpu += time.thread_time() - begun
        seconds.append(time.perf_counter() - start)
        assert scheduled is not None
        sizes.append(len(encode(scheduled.plan)))
        bench.answers.append(bench.workers["w0"].step(scheduled.plan))
    bench.check()
    return {
        "running": float(num_rows),
        "CPU mean µs": cpu / num_steps * 1e6,
        **Times.of(seconds).row(),
        "vLLM 0.32 µs": VLLM_US.get(num_rows),
        "plan bytes": sum(sizes) / len(sizes),
        "max bytes": float(max(sizes)),
    }


def measure_admission(num_times: int, *, warm: bool, **options: Any) -> dict[str, Value]:
    """A prompt of 2,000 tokens is planned in one step, answered, and leaves: unknown to the cache, or known to it.

    Counted is CPU time.
    """
    bench = CoreBench(4, **options)
    parts: dict[str, list[float]] = {"add + schedule": [], "result": [], "abort + schedule": []}
    gc.collect()
    for number in range(num_times + 1):
        message = submission(0 if warm else number, NUM_PROMPT_TOKENS)
        start = time.thread_time()
        bench.core.add_request(message)
        scheduled = bench.core.schedule(0.0)
        planned = time.thread_time()
        assert scheduled is not None
        (new,) = scheduled.plan.added
        assert bool(new.num_computed_tokens) == (warm and number > 0 and bench.core.config.enable_prefix_caching)
        result = bench.workers["w0"].step(scheduled.plan)
        resumed = time.thread_time()
        bench.core.update_from_result(result)
        answered = time.thread_time()
        bench.core.abort_request(message.request_id, "done")
        drops = bench.core.schedule(0.0)
        left = time.thread_time()
        assert drops is not None
        bench.core.update_from_result(bench.workers["w0"].step(drops.plan))
        bench.core.ended_ids.clear()
        if number:
            for name, part in zip(parts, (planned - start, answered - resumed, left - answered), strict=True):
                parts[name].append(part)
    bench.check()
    times = {f"{name} µs": Times.of(seconds).p50 for name, seconds in parts.items()}
    admitted = [planned + answered for planned, answered in zip(*list(parts.values())[:2], strict=True)]
    return {
        "prompt": "known (warm)" if warm else "new (cold)",
        "in all µs": Times.of(admitted).p50,
        "p99 µs": Times.of(admitted).p99,
        **times,
    }


def measure_save(num_prompts: int) -> dict[str, Value]:
    """What the leader saves after one more prompt, with a cache full of what went; for comparison, the whole.

    Counted is CPU time.
    """
    bench = CoreBench(4)
    for number in range(num_prompts):
        _serve(bench, number)
    save_core(bench.core), save_changed_blocks(bench.core)
    seconds, sizes, num_changed = [], [], 0
    for number in range(num_prompts, num_prompts + 20):
        _serve(bench, number)
        num_changed = num_changed_blocks(bench.core)
        start = time.thread_time()
        parts = [save_core(bench.core), *save_changed_blocks(bench.core)["w0", 1].values()]
        seconds.append(time.thread_time() - start)
        sizes.append(sum(map(len, parts)))
    start = time.thread_time()
    whole = take_snapshot(bench.core)
    duration = time.thread_time() - start
    return {
        "cached blocks": float(bench.core.stats().num_cached_blocks),
        "changed": float(num_changed),
        "µs a save": Times.of(seconds).p50,
        "bytes": sum(sizes) / len(sizes),
        "whole µs": duration * 1e6,
        "whole bytes": float(len(whole)),
    }


def _serve(bench: CoreBench, number: int) -> None:
    """A prompt of its own comes, is computed and leaves."""
    bench.core.add_request(submission(number, NUM_PROMPT_TOKENS))
    for _ in range(2):
        bench.plan()
        bench.answer()
        bench.core.abort_request(f"request-{number}", "done")


def measure_fleet(num_workers: int, num_rows: int, num_rounds: int, *, num_output_tokens: int) -> dict[str, Value]:
    """Many full workers. A round is one step of each: their results are taken, then a plan is made for each.

    Requests yield `num_output_tokens` tokens (0: they outlive the measurement); for each that ends another one comes.
    Counted is CPU time: what they would take of a core of their own.
    """
    bench = CoreBench(num_rows, num_workers, num_blocks=100 * num_rows)
    num_requests = num_workers * num_rows
    for index in range(num_requests):
        # The first ones end at different times, as in a pool that has served for long.
        length = num_output_tokens and 1 + (index * 61) % num_output_tokens
        bench.core.add_request(submission(index, max_tokens=length or 1000 + num_rounds))
    bench.settle()
    seconds, num_arrivals = [], 0
    gc.collect()
    for _ in range(num_rounds):
        results = [bench.answers.popleft() for _ in range(num_workers)]
        arrivals = len(bench.core.take_finished())
        messages = [submission(num_requests + n, max_tokens=num_output_tokens) for n in range(arrivals)]
        num_requests += arrivals
        num_arrivals += arrivals
        plans = []
        begun = time.thread_time()
        for message in messages:
            bench.core.add_request(message)
        for result in results:
            bench.core.update_from_result(result)
        while (scheduled := bench.core.schedule(0.0)) is not None:
            plans.append(scheduled)
        seconds.append(time.thread_time() - begun)
        bench.core.take_events()
        for planned in plans:
            bench.answers.append(bench.workers[planned.worker].step(planned.plan))
    bench.check()
    num_plans = num_workers * num_rounds
    return {
        "load": f"{num_output_tokens} tokens each" if num_output_tokens else "decode only",
        "CPU µs a step": sum(seconds) / num_plans * 1e6,
        "arrivals a round": num_arrivals / num_rounds,
        "steps/s each": num_rounds / sum(seconds),
        "p99 round ms": Times.of(seconds).p99 / 1e3,
    }
