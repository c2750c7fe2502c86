"""The benchmark of the KV cache: its arithmetic, its traces, and the real parts at tiny sizes."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.kv_cache.engine_kv import TEXT, break_even, break_evens, measure_codec, measure_swap
from benchmarks.kv_cache.pool_bench import measure_pool, run_length
from benchmarks.kv_cache.simulated import TRACES, measure_hits, measure_memory
from benchmarks.kv_cache.traces import merged
from benchmarks.report import Value
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import Model
from services.scheduler.core.extents import Fit
from services.scheduler.simulator.generators import poisson
from services.scheduler.simulator.trace import check_trace
from tests.fakes.tiny_llama import write_tiny_llama


def test_run_length_counts_blocks_per_copy() -> None:
    assert run_length([[0, 1, 2, 3]]) == 4.0
    assert run_length([[0, 1], [5], [9, 8]]) == 5 / 4
    assert run_length([]) == 0.0


@pytest.mark.parametrize("fit", Fit)
@pytest.mark.parametrize("cached", [False, True])
def test_the_pool_is_measured_under_churn(fit: Fit, cached: bool) -> None:
    row = measure_pool(fit, 300, 40, cached=cached)
    costs = [float(row[f"{part} ns/block"] or 0) for part in ("admit", "grow", "release")]
    assert all(cost > 0 for cost in costs)
    assert 1 <= float(row["blocks per run"] or 0) < 30
    assert (row["free runs"] == 0) <= cached, "without a cache something is free at 95 %"


def test_paged_memory_holds_more_requests_and_wastes_less_than_the_bar() -> None:
    paged, preallocated = measure_memory(num_blocks=512, num_requests=60)
    waste = "slots without a token, of those given out %"
    assert 0 < float(paged[waste] or 0) < 4 < 50 < float(preallocated[waste] or 0)
    assert preallocated["requests at a time"] == 4
    assert float(paged["requests at a time"] or 0) > 8


def test_traces_are_sound_and_merging_keeps_them_apart() -> None:
    for make in TRACES.values():
        trace = make()
        check_trace(trace)
        assert len(trace) >= 700
    one = poisson(requests=3, seed=1)
    both = merged(one, one)
    assert len({request.prompt for request in both}) == 6, "equal names would share prefixes"
    assert [request.arrival for request in both] == sorted(request.arrival for request in both)


def test_hit_rates_differ_by_eviction_and_stay_below_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kv_cache.simulated.TRACES", {"documents and scans": TRACES["documents and scans"]})
    (row,) = measure_hits(1500)
    rates = [float(row[f"{name} %"] or 0) for name in ("lru", "lfu", "fifo")]
    assert len(set(rates)) > 1 and 0 < min(rates) <= max(rates) <= float(row["unlimited %"] or 0)


def test_break_even_is_where_the_swap_stays_faster() -> None:
    rows: list[dict[str, Value]] = [{"tokens": n, "recompute ms": n, "swap ms": 8.0} for n in (1.0, 16.0, 64.0)]
    assert break_even(rows, "swap") == 16
    rows[-1]["recompute ms"] = 7.0
    assert break_even(rows, "swap") == math.inf


def test_break_even_of_the_cost_model_is_where_both_cost_the_same() -> None:
    """A token takes 1 ms to compute, a block of 16 takes 8 ms to copy, half of it out: 4 ms each way."""
    row: dict[str, Value] = {
        "tokens": 64.0,
        "KV kB": 40.0,
        "recompute ms": 64.0,
        "swap ms": 32.0,
        "swap, int8 ms": 320.0,
    }
    plain, int8 = break_evens([row])
    assert plain["by the cost model"] == 9, "8 tokens take as long as their block"
    assert (plain["prefill tokens/s"], plain["copies MB/s"]) == (1000, 2.5)
    assert plain["recompute is faster below MB/s"] == pytest.approx(1.25)
    assert int8["by the cost model"] == int8["swap is faster from tokens"] == math.inf


def test_swap_and_codec_are_measured_on_a_real_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    tokens = [5 + (7 * position) % 80 for position in range(64)]
    with torch.inference_mode():
        rows = measure_swap(model, tokens, (1, 32), num_times=2)
        assert [row["KV kB"] for row in rows] == [_kv_kb(model, 1), _kv_kb(model, 2)]
        codec = measure_codec(model, tokens, 32)
    assert [row["tokens"] for row in rows] == [1.0, 32.0]
    assert all(float(row[f"{name} ms"] or 0) > 0 for row in rows for name in ("recompute", "swap", "swap, int8"))
    assert codec["tokens predicted"] == 2 * 15
    assert 0.1 < float(codec["relative error %"] or 0) < 3
    exact, coded = (float(codec[f"perplexity, {name}"] or 0) for name in ("exact", "int8"))
    assert exact != coded and coded == pytest.approx(exact, rel=0.05)


def _kv_kb(model: Model, num_blocks: int) -> float:
    config = model.config
    return num_blocks * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 16 * 4 / 1e3


def test_the_text_is_long_enough() -> None:
    assert len(TEXT.read_text(encoding="utf-8").split()) > 800
