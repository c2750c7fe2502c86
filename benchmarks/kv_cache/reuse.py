"""From the simulator: what it is worth that cached blocks outlive their requests, and that evicted ones go on."""

from collections.abc import Iterable, Mapping

from benchmarks.kv_cache.simulation import ACCELERATOR, CPU, Machine, run, speed
from benchmarks.report import Value
from services.scheduler.core.blocks import Reclaim
from services.scheduler.simulator import Report, Trace
from services.scheduler.simulator.generators import chat, poisson

NUM_BLOCKS = 400
NUM_CPU_BLOCKS = 4000
PACES = {CPU: (0.06, 60.0), ACCELERATOR: (3.0, 5.0)}
"""Conversations that begin per second, and seconds that people think: all of their blocks are more than there are."""
SCAN_RATES = {CPU: 0.3, ACCELERATOR: 12.0}
"""Requests per second: most of what the machine can serve."""


def conversations(machine: Machine, requests: int) -> Trace:
    """Four turns each: many are evicted before their next turn."""
    rate, think = PACES[machine]
    return chat(
        requests=requests, rate=rate, turns=4, systems=4, system=400, prompt=60, output=100, think=think, seed=5
    )


def scan(machine: Machine, requests: int) -> Trace:
    """No prompt comes twice."""
    return poisson(requests=requests, rate=SCAN_RATES[machine], prompt=600, output=60, seed=9)


def measure_reclaim(requests: int) -> list[dict[str, Value]]:
    """Cached blocks stay until their room is needed, or go with the last table that refers to them."""
    rows: list[dict[str, Value]] = []
    for machine in PACES:
        trace = conversations(machine, requests)
        for reclaim in Reclaim:
            report = run(trace, machine, num_blocks=NUM_BLOCKS, reclaim=reclaim)
            rows.append({"load": f"chats, {machine.name}", "reclaim": str(reclaim), **_hits(report), **speed(report)})
    return rows


def measure_demotion(requests: int) -> list[dict[str, Value]]:
    """Evicted blocks are gone, or go on in a host pool that is larger than the KV cache; also where nothing returns."""
    rows: list[dict[str, Value]] = []
    loads = [(f"chats, {machine.name}", machine, conversations(machine, requests)) for machine in PACES]
    loads += [(f"no hits, {machine.name}", machine, scan(machine, requests)) for machine in SCAN_RATES]
    for name, demotion, report in _with_and_without(loads):
        copies: Mapping[str, Value] = {
            "blocks out": float(report.swapped_out_blocks),
            "blocks back": float(report.swapped_in_blocks),
        }
        rows.append({"load": name, "demotion": demotion, **_hits(report), **speed(report), **copies})
    return rows


def _with_and_without(loads: Iterable[tuple[str, Machine, Trace]]) -> Iterable[tuple[str, str, Report]]:
    for name, machine, trace in loads:
        for demotion in (False, True):
            report = run(trace, machine, num_blocks=NUM_BLOCKS, num_cpu_blocks=NUM_CPU_BLOCKS, demotion=demotion)
            yield name, "on" if demotion else "off", report


def _hits(report: Report) -> dict[str, Value]:
    return {"hits %": 100 * report.hit_rate}
