"""From the simulator: what it is worth that choices of one prompt (`n`, `best_of`) are forked from each other."""

from dataclasses import replace

from benchmarks.kv_cache.simulation import CPU, run, speed
from benchmarks.kv_cache.traces import apart
from benchmarks.report import Value
from services.scheduler.simulator import Trace
from services.scheduler.simulator.generators import poisson

NUM_BLOCKS = 3000


def measure_choices(num_choices: int, requests: int) -> list[dict[str, Value]]:
    """Prompts around 500 tokens; choices that fork, equal prompts side by side with the prefix cache, and without."""
    prompts = poisson(requests=requests, rate=0.1, prompt=500, output=80, seed=9)
    choices = [replace(request, num_choices=num_choices) for request in prompts]
    runs: dict[str, tuple[Trace, bool]] = {
        "forked": (choices, True),
        "prefix cache alone": (apart(choices), True),
        "each by itself": (apart(choices), False),
    }
    rows: list[dict[str, Value]] = []
    for name, (trace, is_cached) in runs.items():
        report = run(trace, CPU, num_blocks=NUM_BLOCKS, enable_prefix_caching=is_cached)
        rows.append(
            {
                "choices": str(num_choices),
                "stored": name,
                "blocks a request": report.used_share * NUM_BLOCKS / report.running_mean,
                "peak blocks": report.used_share_peak * NUM_BLOCKS,
                "copied on write": float(report.copied_blocks),
                **speed(report),
            }
        )
    return rows
