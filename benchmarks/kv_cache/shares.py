"""From the simulator: what it is worth that no policy starves anybody: ageing, weights, no credit for idle times."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

from benchmarks.kv_cache.order import ROWS, URGENT, seconds_of, served_while_backlogged, ttft_columns
from benchmarks.kv_cache.simulation import CPU, run
from benchmarks.kv_cache.traces import by_arrival, renamed
from benchmarks.report import Value
from services.scheduler.core.policies.base import Policy, PolicyName
from services.scheduler.core.policies.fair import Fair
from services.scheduler.simulator.generators import poisson

PATIENT = 2
NEVER_S = 1e9
"""Ageing so slow that a better priority always goes first."""
RETURN_S = 120.0
"""When the tenant that wanted nothing so far sends a burst."""


def measure_ageing(requests: int) -> list[dict[str, Value]]:
    """More urgent requests than the worker can serve, and one in ten that is not urgent."""
    urgent = poisson(requests=requests, rate=1.2, prompt=200, output=150, seed=6)
    patient = poisson(requests=requests // 10, rate=0.12, prompt=200, output=150, seed=7)
    trace = by_arrival(renamed(urgent, "urgent:", priority=URGENT), renamed(patient, "patient:", priority=PATIENT))
    rows: list[dict[str, Value]] = []
    for name, ageing_s in (("for ever", NEVER_S), ("60 s", 60.0), ("10 s", 10.0)):
        report = run(
            trace, CPU, num_blocks=2000, max_num_seqs=ROWS, policy=PolicyName.PRIORITY, priority_ageing_s=ageing_s
        )
        rows.append(
            {
                "a better priority goes before": name,
                **ttft_columns("patient", seconds_of(report, lambda name: name.startswith("patient"))),
                **ttft_columns("urgent", seconds_of(report, lambda name: name.startswith("urgent"))),
            }
        )
    return rows


def measure_weights() -> list[dict[str, Value]]:
    """What the tenant `one` is served for each token of the other's, both backlogged."""
    rows: list[dict[str, Value]] = []
    for weight in (1, 2, 4):
        served = served_while_backlogged(PolicyName.FAIR, tenant_weights=f"one={weight}")
        rows.append({"weights": f"{weight} : 1", "tokens served": served["one"] / served["other"]})
    return rows


def measure_credit(requests: int) -> list[dict[str, Value]]:
    """One tenant sends more than it can be served; another one wants nothing for two minutes, and then as much."""
    steady = poisson(requests=requests, rate=1.2, prompt=100, output=100, seed=8)
    burst = poisson(requests=requests // 2, rate=20.0, prompt=100, output=100, seed=9)
    late = [
        replace(request, arrival=request.arrival + RETURN_S) for request in renamed(burst, "burst:", tenant="burst")
    ]
    trace = by_arrival(renamed(steady, "steady:", tenant="steady"), late)
    rows: list[dict[str, Value]] = []
    for name, change in (("lifted to those that wait", nullcontext()), ("has credit for the idle time", kept_credit())):
        with change:
            report = run(trace, CPU, num_blocks=2000, max_num_seqs=ROWS, policy=PolicyName.FAIR)
        steps = sorted(client.arrival + client.ttft for client in report.clients if client.request_id[0] == "s")
        silences = [later - sooner for sooner, later in pairwise(steps) if later > RETURN_S]
        rows.append({"a tenant that comes back": name, "the other is admitted nothing for s": max(silences)})
    return rows


def kept_credit() -> AbstractContextManager[object]:
    """The policy as if nobody were lifted: who wanted nothing has his share of the past still to come."""
    return patch.object(Fair, "on_backlog", Policy.on_backlog)
