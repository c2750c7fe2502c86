"""From the simulator: how long prompts keep running streams waiting, by the size of a step and by a target."""

from benchmarks.kv_cache.simulation import CPU, run
from benchmarks.report import Value
from services.scheduler.simulator.generators import bimodal

CASES: tuple[tuple[str, int, float], ...] = (
    ("whole prompts", 8192, 0.0),
    ("chunks, 512 tokens a step", 512, 0.0),
    ("chunks, 128 tokens a step", 128, 0.0),
    ("chunks, target 0.5 s", 512, 0.5),
    ("chunks, target 0.3 s", 512, 0.3),
)
"""Name, tokens of a step, `itl_target_s`."""


def measure_decode_latency(requests: int) -> list[dict[str, Value]]:
    """Streams of short prompts, and 15 % with prompts around 3,000 tokens."""
    trace = bimodal(requests=requests, rate=0.15, share=0.15, prompt=100, long=3000, output=100, seed=3)
    rows: list[dict[str, Value]] = []
    for name, budget, target in CASES:
        report = run(trace, CPU, num_blocks=3000, max_num_batched_tokens=budget, itl_target_s=target)
        rows.append(
            {
                "prefill": name,
                "ITL p50 ms": 1e3 * report.itl.p50,
                "ITL p99 ms": 1e3 * report.itl.p99,
                "ITL max ms": 1e3 * report.itl.max,
                "TTFT p50 s": report.ttft.p50,
                "TTFT p99 s": report.ttft.p99,
                "output tokens/s": report.output_tokens_per_s,
            }
        )
    return rows
