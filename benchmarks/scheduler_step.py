"""What the scheduler core costs: a steady decode step (`schedule()` plus `update_from_result()`), the plan's bytes, the
admission of a long prompt, a snapshot.

Block phases are staggered, plans are two ahead, requests run for the whole measurement, every request has a text of its
own. No Redis, no worker. `cpu` is the mean of the thread's own time: on a busy machine it says more than `mean`.

    python -m benchmarks.scheduler_step [--steps 1600] [--no-enable-prefix-caching]
"""

import argparse
import gc
import statistics
import time
from collections import deque
from typing import Any

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import take_snapshot
from shared.messages import StepResult, Submission, WorkerJoined, encode
from shared.packing import NO_TOKEN, pack_int32
from shared.sampling import SamplingParams

MAX_TOKENS = 100_000
NUM_PROMPT_TOKENS = 2_000


def submission(index: int, size: int = 0) -> Submission:
    prompt = pack_int32([index, *range(1, size or 2 + (index * 37) % 160)])
    return Submission(f"request-{index}", "m", "completion", 0.0, prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=0))


class Bench:
    """One worker with `num_rows` rows."""

    def __init__(self, num_rows: int, **options: Any) -> None:
        limits: dict[str, Any] = {
            "max_model_len": 200_000,
            "max_num_seqs": num_rows,
            "max_num_batched_tokens": num_rows + 4096,
        }
        self.core = SchedulerCore(SchedulerConfig(**limits, **options))
        self.core.on_worker_joined(WorkerJoined("w", 1, 400 * num_rows + 20_000))
        self.num_rows = num_rows
        self.in_flight: deque[StepResult] = deque()
        self.yielding = 0
        self.known: dict[int, int] = {}

    def plan(self) -> int:
        """Make one plan; its encoded size."""
        scheduled = self.core.schedule(0.0)
        assert scheduled is not None
        plan = scheduled.plan
        for new in plan.added:
            self.known[new.row] = len(new.tokens) // 4 - new.num_computed_tokens
        rows = [row for row, num_scheduled in plan.chunks if self._completes(row, num_scheduled)]
        self.yielding = max(self.yielding, max(rows, default=-1) + 1)
        tokens = [7 if row not in self.known else NO_TOKEN for row in range(self.yielding)]
        self.in_flight.append(StepResult("w", 1, plan.plan_id, pack_int32(tokens)))
        return len(encode(plan))

    def _completes(self, row: int, num_scheduled: int) -> bool:
        self.known[row] -= num_scheduled
        return not self.known[row] and self.known.pop(row) == 0

    def answer(self) -> None:
        self.core.update_from_result(self.in_flight.popleft())

    def settle(self) -> None:
        """Until everything decodes."""
        while len(self.core.waiting) or self.core.lanes["w"].prefill:
            self.plan()
            self.answer()


def measure(num_rows: int, num_steps: int, **options: Any) -> str:
    """Steady decode."""
    bench = Bench(num_rows, **options)
    for index in range(num_rows):
        bench.core.add_request(submission(index))
    bench.plan()
    bench.settle()
    result = bench.in_flight[-1]
    times, sizes, cpu = [], [], 0.0
    gc.collect()
    for _ in range(num_steps):
        start, begun = time.perf_counter(), time.thread_time()
        scheduled = bench.core.schedule(0.0)
        bench.core.update_from_result(bench.in_flight.popleft())
        cpu += time.thread_time() - begun
        times.append(time.perf_counter() - start)
        assert scheduled is not None
        sizes.append(len(encode(scheduled.plan)))
        bench.in_flight.append(StepResult("w", 1, scheduled.plan.plan_id, result.tokens))
    bench.core.check_integrity()
    assert not bench.core.broken_workers()
    mean, p99 = statistics.mean(times) * 1e6, statistics.quantiles(times, n=100)[98] * 1e6
    median = statistics.median(times) * 1e6
    columns = "   ".join(f"{value:8.1f}" for value in (mean, cpu / num_steps * 1e6, median, p99))
    return f"{num_rows:7d}   {columns}   {statistics.mean(sizes):10.0f}"


def measure_admission(num_times: int, *, again: bool, **options: Any) -> str:
    """A prompt of 2,000 tokens comes, is computed in one step and ends: unknown to the cache, or known."""
    bench = Bench(4, **options)
    parts: dict[str, list[float]] = {"admit": [], "answer": [], "leave": []}
    gc.collect()
    for number in range(num_times + 1):
        message = submission(0 if again else number, NUM_PROMPT_TOKENS)
        start = time.perf_counter()
        bench.core.add_request(message)
        scheduled = bench.core.schedule(0.0)
        planned = time.perf_counter()
        assert scheduled is not None
        bench.core.update_from_result(StepResult("w", 1, scheduled.plan.plan_id, pack_int32([7])))
        answered = time.perf_counter()
        bench.core.abort_request(message.request_id, "done")
        drops = bench.core.schedule(0.0)
        left = time.perf_counter()
        assert drops is not None
        bench.core.update_from_result(StepResult("w", 1, drops.plan.plan_id))
        bench.core.ended_ids.clear()
        if number:
            for name, duration in zip(parts, (planned - start, answered - planned, left - answered), strict=True):
                parts[name].append(duration)
    assert not bench.core.broken_workers()
    return "   ".join(f"{name} {statistics.median(values) * 1e6:6.1f} µs" for name, values in parts.items())


def measure_snapshot(num_prompts: int) -> str:
    """With a cache that is full of what went."""
    bench = Bench(4)
    for number in range(num_prompts):
        bench.core.add_request(submission(number, NUM_PROMPT_TOKENS))
        bench.plan()
        bench.answer()
        bench.core.abort_request(f"request-{number}", "done")
        bench.plan()
        bench.in_flight[-1] = StepResult("w", 1, bench.in_flight[-1].step_id)
        bench.answer()
    start = time.perf_counter()
    size = len(take_snapshot(bench.core))
    duration = time.perf_counter() - start
    num_cached = bench.core.stats().num_cached_blocks
    return f"{num_cached} cached blocks: {duration * 1e3:.1f} ms, {size / max(num_cached, 1):.0f} bytes a block"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    options = {"enable_prefix_caching": arguments.enable_prefix_caching}
    print("running    mean µs     cpu µs     p50 µs     p99 µs   bytes/plan")
    for num_rows in (16, 64, 256, 1024):
        print(measure(num_rows, arguments.steps, **options), flush=True)
    print(f"a prompt of {NUM_PROMPT_TOKENS} tokens, medians")
    print(f"  new     {measure_admission(400, again=False, **options)}", flush=True)
    print(f"  again   {measure_admission(400, again=True, **options)}", flush=True)
    if arguments.enable_prefix_caching:
        print(f"snapshot with {measure_snapshot(160)}")


if __name__ == "__main__":
    main()
