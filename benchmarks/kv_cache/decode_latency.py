"""From the simulator: how long prompts keep running streams waiting, by the size of a step and by a target, and what
that costs a pool in which everybody comes at once.
"""

from benchmarks.kv_cache.simulation import CPU, run
from benchmarks.report import Value
from services.scheduler.settings import Settings
from services.scheduler.simulator import Trace, WorkerChange
from services.scheduler.simulator.generators import bimodal, poisson

Case = tuple[str, int, float]
"""Name, tokens of a step, `itl_target_s`."""
WITHOUT = ("chunks, 512 tokens a step", 512, 0.0)
DEATH = (WorkerChange(at=12.0, action="kill", worker="worker-0"),)
DEFAULT_TARGET_S: float = Settings.model_fields["itl_target_s"].default
CASES: tuple[Case, ...] = (
    ("whole prompts", 8192, 0.0),
    WITHOUT,
    ("chunks, 128 tokens a step", 128, 0.0),
    ("chunks, target 0.5 s", 512, 0.5),
    ("chunks, target 0.3 s", 512, 0.3),
    (f"chunks, target {DEFAULT_TARGET_S} s, the default", 512, DEFAULT_TARGET_S),
)


def measure_decode_latency(requests: int) -> list[dict[str, Value]]:
    """Streams of short prompts, and 15 % with prompts around 3,000 tokens."""
    trace = bimodal(requests=requests, rate=0.15, share=0.15, prompt=100, long=3000, output=100, seed=3)
    return _rows(trace, CASES)


def measure_burst(requests: int) -> list[dict[str, Value]]:
    """Prompts around 130 tokens, all at once: what a step leaves out of them are rows that decode later."""
    return _rows(poisson(requests=requests, rate=1000.0, prompt=130, output=64, seed=1), (WITHOUT, *CASES[-2:]))


def measure_death() -> list[dict[str, Value]]:
    """16 streams on two workers, one of which dies halfway: the longest gap is that of a stream that goes on at the
    other one, and the others' is how long a step becomes for its sake."""
    trace = poisson(requests=16, rate=1000.0, prompt=130, output=96, seed=1)
    rows: list[dict[str, Value]] = []
    for name, changes, target in (
        ("no death", (), DEFAULT_TARGET_S),
        (f"a death, target {DEFAULT_TARGET_S} s", DEATH, DEFAULT_TARGET_S),
        ("a death, no target", DEATH, 0.0),
    ):
        report = run(trace, CPU, num_blocks=3000, num_workers=2, changes=changes, itl_target_s=target)
        rows.append(
            {
                "streams": name,
                "ITL p90 ms": 1e3 * report.itl.p90,
                "ITL p99 ms": 1e3 * report.itl.p99,
                "ITL max ms": 1e3 * report.itl.max,
                "output tokens/s": report.output_tokens_per_s,
            }
        )
    return rows


def _rows(trace: Trace, cases: tuple[Case, ...]) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for name, budget, target in cases:
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
