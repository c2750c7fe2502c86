"""What one steady decode step costs the scheduler core: `schedule()` plus `update_from_result()`, and the plan's bytes.

Block phases are staggered, plans are two ahead, requests run for the whole measurement. No Redis, no worker.

    python -m benchmarks.scheduler_step [--steps 1600]
"""

import argparse
import gc
import statistics
import time
from collections import deque

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import StepResult, Submission, WorkerJoined, encode
from shared.packing import NO_TOKEN, pack_int32
from shared.sampling import SamplingParams

MAX_TOKENS = 100_000


def submission(index: int) -> Submission:
    prompt = pack_int32(range(1, 2 + (index * 37) % 160))
    return Submission(f"request-{index}", "m", "completion", 0.0, prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=0))


class Bench:
    """One worker with `num_rows` rows."""

    def __init__(self, num_rows: int) -> None:
        config = SchedulerConfig(max_model_len=200_000, max_num_seqs=num_rows, max_num_batched_tokens=num_rows + 4096)
        self.core = SchedulerCore(config)
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
            self.known[new.row] = len(new.tokens) // 4
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


def measure(num_rows: int, num_steps: int) -> str:
    bench = Bench(num_rows)
    for index in range(num_rows):
        bench.core.add_request(submission(index))
    bench.plan()
    while len(bench.core.waiting) or bench.core.lanes["w"].prefill:
        bench.plan()
        bench.answer()
    result = bench.in_flight[-1]
    times, sizes = [], []
    gc.collect()
    for _ in range(num_steps):
        start = time.perf_counter()
        scheduled = bench.core.schedule(0.0)
        bench.core.update_from_result(bench.in_flight.popleft())
        times.append(time.perf_counter() - start)
        assert scheduled is not None
        sizes.append(len(encode(scheduled.plan)))
        bench.in_flight.append(StepResult("w", 1, scheduled.plan.plan_id, result.tokens))
    bench.core.check_integrity()
    assert not bench.core.broken_workers()
    mean, p99 = statistics.mean(times) * 1e6, statistics.quantiles(times, n=100)[98] * 1e6
    median = statistics.median(times) * 1e6
    return f"{num_rows:7d}   {mean:8.1f}   {median:8.1f}   {p99:8.1f}   {statistics.mean(sizes):10.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    steps = parser.parse_args().steps
    print("running    mean µs     p50 µs     p99 µs   bytes/plan")
    for num_rows in (16, 64, 256, 1024):
        print(measure(num_rows, steps), flush=True)


if __name__ == "__main__":
    main()
