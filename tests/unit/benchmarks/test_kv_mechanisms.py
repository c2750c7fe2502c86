"""Each mechanism's benchmark at a small size: it happens where it is on and not where it is off, and it pays."""

from collections import Counter

import pytest

from benchmarks.kv_cache import preemptions, reuse
from benchmarks.kv_cache.decode_latency import measure_burst, measure_death, measure_decode_latency
from benchmarks.kv_cache.order import jain, measure_bypass, measure_policies, served_while_backlogged
from benchmarks.kv_cache.placing import by_load_only, measure_placement
from benchmarks.kv_cache.preemptions import measure_preemption
from benchmarks.kv_cache.reuse import measure_demotion, measure_reclaim
from benchmarks.kv_cache.shares import measure_ageing, measure_credit, measure_weights
from benchmarks.kv_cache.sharing import measure_choices
from benchmarks.kv_cache.simulation import ACCELERATOR, CPU
from benchmarks.kv_cache.traces import apart
from benchmarks.report import Value
from services.scheduler.core.placement import Placement
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.simulator.generators import poisson

Rows = list[dict[str, Value]]


def number(row: dict[str, Value], name: str) -> float:
    return float(row[name] or 0)


def test_cached_blocks_that_stay_are_hit_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "PACES", {ACCELERATOR: (3.0, 5.0)})
    lazy, immediate = measure_reclaim(80)
    assert (lazy["reclaim"], immediate["reclaim"]) == ("lazy", "immediate")
    assert number(lazy, "hits %") > number(immediate, "hits %") > 0
    assert number(lazy, "TTFT mean s") < number(immediate, "TTFT mean s")


def test_demoted_blocks_come_back_where_prompts_return_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "PACES", {ACCELERATOR: (3.0, 5.0)})
    monkeypatch.setattr(reuse, "SCAN_RATES", {ACCELERATOR: 4.0})
    off, on, scan_off, scan_on = measure_demotion(160)
    assert number(off, "blocks out") == number(scan_off, "blocks out") == 0
    assert number(on, "blocks back") > 100 and number(on, "hits %") > number(off, "hits %") + 5
    assert number(scan_on, "blocks out") > 100 and number(scan_on, "blocks back") == 0


def test_forks_store_a_prompt_once() -> None:
    forked, cached, alone = measure_choices(4, 8)
    peaks = [number(row, "peak blocks") for row in (forked, cached, alone)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert number(forked, "copied on write") > 8
    assert number(cached, "copied on write") == number(alone, "copied on write") == 0


def test_choices_apart_are_requests_of_their_own() -> None:
    (one,) = poisson(requests=1)
    assert apart([one]) == [one]


def test_residency_draws_requests_to_the_worker_that_has_their_beginning() -> None:
    before = Placement._with_hits
    rows = measure_placement(40)
    assert Placement._with_hits is before
    for by_residency, by_load in zip(rows[::2], rows[1::2], strict=True):
        assert number(by_residency, "hits %") > number(by_load, "hits %") + 5
    with by_load_only():
        assert Placement._with_hits is not before


def test_the_cost_model_takes_the_better_way_of_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = preemptions._copying_at(3e6)
    monkeypatch.setattr(preemptions, "MACHINES", ((CPU, 0.5), (slow, 0.5)))
    rows = measure_preemption(60)
    for recompute, swap, auto in (rows[:3], rows[3:]):
        assert number(recompute, "preempted") > 5 and number(recompute, "blocks out") == 0
        assert number(swap, "blocks in") > 0 and number(swap, "tokens again") == 0
        assert number(auto, "latency mean s") <= min(number(row, "latency mean s") for row in (recompute, swap)) * 1.02
    assert number(rows[2], "blocks out") > 0 == number(rows[5], "blocks out")


def test_chunks_and_targets_shorten_the_longest_gap() -> None:
    """Prompts are long enough for their attention to take more time than the rest: the targets hold all the same."""
    longest = [number(row, "ITL max ms") for row in measure_decode_latency(40)]
    assert longest[0] > longest[1] > longest[3] > longest[4]
    assert longest[3] < 510 and longest[4] < 310 and longest[5] < longest[4]


def test_a_target_makes_a_burst_wait_for_first_tokens() -> None:
    without, loose, tight = measure_burst(32)
    for name in ("ITL max ms", "output tokens/s"):
        assert number(without, name) > number(loose, name) > number(tight, name)
    assert number(without, "TTFT p99 s") < number(loose, "TTFT p99 s") < number(tight, "TTFT p99 s")


def test_a_target_holds_nobody_back_whose_worker_died() -> None:
    alive, dead, unbounded = measure_death()
    assert number(dead, "ITL max ms") < 1.1 * number(unbounded, "ITL max ms")
    assert number(alive, "ITL max ms") < 0.1 * number(dead, "ITL max ms")
    assert number(dead, "ITL p99 ms") < number(unbounded, "ITL p99 ms")


def test_bypass_helps_those_who_pass() -> None:
    never, *_, always = measure_bypass(80)
    assert number(always, "short: TTFT mean s") < number(never, "short: TTFT mean s")


def test_policies_differ_in_whom_they_serve_first() -> None:
    rows = {row["policy"]: row for row in measure_policies(40)}
    urgent = {policy: number(rows[policy], "urgent: TTFT mean s") for policy in PolicyName}
    assert max(urgent[PolicyName.PRIORITY], urgent[PolicyName.FAIR]) < urgent[PolicyName.FCFS] / 3
    assert number(rows[PolicyName.FAIR], "Jain index") >= 0.95 > number(rows[PolicyName.FCFS], "Jain index")


def test_the_faster_priorities_age_the_sooner_a_patient_request_is_served() -> None:
    never, slow, fast = measure_ageing(200)
    waits = [number(row, "patient: TTFT mean s") for row in (never, slow, fast)]
    assert waits[0] > waits[1] > waits[2]


def test_tokens_are_served_by_weight() -> None:
    for row, weight in zip(measure_weights(), (1, 2, 4), strict=True):
        assert number(row, "tokens served") == pytest.approx(weight, rel=0.1)


def test_without_the_lift_a_tenant_that_idled_takes_everything() -> None:
    lifted, credit = (number(row, "the other is admitted nothing for s") for row in measure_credit(150))
    assert credit > 3 * lifted


def test_what_tenants_get_is_counted_between_two_times() -> None:
    """A row yields a token per step: sixteen of them at most, in steps of at least 80 ms, beside prompts."""
    served = served_while_backlogged(PolicyName.FAIR, since=5.0, until=25.0)
    assert set(served) == {"one", "other"}
    assert 1000 < served.total() < 20 / 0.0027


def test_jain_of_equal_and_of_one_sided_shares() -> None:
    assert jain(Counter(a=5, b=5)) == 1.0
    assert jain(Counter(a=5, b=0)) == 0.5
