"""From the simulator: what it is worth to choose per victim whether its KV is copied away or computed again."""

from dataclasses import replace

from benchmarks.kv_cache.simulation import ACCELERATOR, CPU, Machine, run, speed
from benchmarks.report import Value
from services.scheduler.core.cost_model import Preemption
from services.scheduler.simulator.generators import poisson

NUM_BLOCKS = 400
NUM_CPU_BLOCKS = 2000


def _copying_at(bytes_per_s: float) -> Machine:
    name = f"CPU, copies {bytes_per_s / 1e6:.0f} MB/s"
    return replace(CPU, name=name, latency=replace(CPU.latency, copy_bytes_per_s=bytes_per_s))


MACHINES = ((CPU, 0.5), (_copying_at(17e6), 0.5), (_copying_at(3e6), 0.5), (ACCELERATOR, 25.0))
"""With requests per second: more than fit. 17 MB/s is where the cost model changes its mind."""


def measure_preemption(requests: int) -> list[dict[str, Value]]:
    """Outputs longer than prompts in a pool that is too small for those who are admitted."""
    rows: list[dict[str, Value]] = []
    for machine, rate in MACHINES:
        trace = poisson(requests=requests, rate=rate, prompt=200, output=300, seed=3)
        for preemption in Preemption:
            report = run(
                trace,
                machine,
                num_blocks=NUM_BLOCKS,
                num_cpu_blocks=NUM_CPU_BLOCKS,
                preemption=preemption,
                demotion=False,
            )
            rows.append(
                {
                    "machine": machine.name,
                    "preemption": str(preemption),
                    "preempted": float(report.num_preemptions),
                    "tokens again": float(report.num_recomputed_tokens),
                    "blocks out": float(report.swapped_out_blocks),
                    "blocks in": float(report.swapped_in_blocks),
                    "latency mean s": report.latency.mean,
                    **speed(report),
                }
            )
    return rows
