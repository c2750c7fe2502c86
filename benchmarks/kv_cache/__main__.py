"""What the KV cache's and the scheduler's mechanisms are worth; exit code 1 if a bar is missed.

    make bench-kv            or    python -m benchmarks.kv_cache [--json FILE] [--model FOLDER]

From the simulator (the real core in virtual time, so the same figures on every machine): memory, hit rates, and each
mechanism against what there would be without it. From the real block pool: cost of a block, contiguity. From the real
model: memory and sharing in the worker's engine, swap or recompute, int8. About two minutes.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.kv_cache.decode_latency import measure_burst, measure_death, measure_decode_latency
from benchmarks.kv_cache.engine_kv import break_evens, measure_codec, measure_swap, tokens_of
from benchmarks.kv_cache.order import measure_bypass, measure_policies
from benchmarks.kv_cache.placing import measure_placement
from benchmarks.kv_cache.pool_bench import measure_pool
from benchmarks.kv_cache.preemptions import measure_preemption
from benchmarks.kv_cache.real_memory import Load, measure_real_memory
from benchmarks.kv_cache.real_sharing import measure_real_sharing
from benchmarks.kv_cache.reuse import measure_demotion, measure_reclaim
from benchmarks.kv_cache.shares import measure_ageing, measure_credit, measure_weights
from benchmarks.kv_cache.sharing import measure_choices
from benchmarks.kv_cache.simulated import WASTE, measure_hits, measure_memory
from benchmarks.report import Bar, Report, Row
from services.cli.settings import load_settings
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import Model
from services.scheduler.core.extents import Fit
from services.scheduler.core.policies.base import PolicyName
from shared.model_store import DEFAULT_MODEL, resolve

WASTE_BAR, JAIN_BAR, ITL_BAR = 4.0, 0.95, 310.0
LENGTHS = (1, 16, 64, 256, 512)
SEGMENT = 256
SHARED_PROMPT, SEQUENCES, OUTPUT = 205, 8, 32
"""Tokens, rows, tokens."""


def waste_bar(name: str, rows: list[Row]) -> Bar:
    return Bar(name, float(rows[0][WASTE] or 0), WASTE_BAR, "%")


def memory(report: Report) -> None:
    rows: list[Row] = [*measure_memory(num_blocks=2048, num_requests=800)]
    bars = [waste_bar("waste of paged memory, simulated", rows)]
    report.add("32,768 tokens of KV memory, simulated requests of 300 + 200 tokens on average", rows, bars)
    report.add("prefix hits by eviction, simulated, 1,500 blocks", measure_hits(1500))


def mechanisms(report: Report) -> None:
    """Each of them on, off, or against its alternatives."""
    report.add("reclaim: cached blocks outlive their requests, or not", measure_reclaim(400))
    report.add("demotion: evicted blocks go on in the host pool, or not", measure_demotion(400))
    report.add("sharing: choices of one prompt", [row for n in (4, 16) for row in measure_choices(n, 60)])
    report.add("placement: by residency and load, or by load only", measure_placement(250))
    report.add("preemption: always recompute, always swap, or by the cost model", measure_preemption(150))
    rows: list[Row] = [*measure_decode_latency(150)]
    bars = [Bar("longest gap under a target of 300 ms", float(rows[-2]["ITL max ms"] or 0), ITL_BAR, "ms")]
    report.add("decode latency: streams of short prompts beside long prompts", rows, bars)
    report.add("decode latency: 64 requests at once", measure_burst(64))
    report.add("decode latency: a worker dies, and another one goes on with its streams", measure_death())
    report.add("bounded bypass: short prompts behind long ones that lack blocks", measure_bypass(300))
    rows = [*measure_policies(100)]
    jain = next(float(row["Jain index"] or 0) for row in rows if row["policy"] == PolicyName.FAIR)
    bars = [Bar("Jain index of two backlogged tenants under fair", jain, JAIN_BAR, "", at_least=True)]
    report.add("policies: 100 long requests at once, and a short one every five seconds", rows, bars)
    report.add("ageing: urgent requests without end, and one in ten that is two priorities behind", measure_ageing(300))
    report.add("weights: tokens served to one of two backlogged tenants per token of the other", measure_weights())
    report.add("no credit for idle times", measure_credit(300))


def pool(report: Report) -> None:
    rows = [measure_pool(fit, 4096, 1500, cached=cached) for cached in (False, True) for fit in Fit]
    report.add("the block pool, 95 % in tables, requests come and go", rows)


def engine(report: Report, model: Model, tokens: list[int]) -> None:
    """The worker's engine serves requests that the core plans."""
    rows: list[Row] = [*measure_real_memory(model, tokens, load := Load())]
    bars = [waste_bar("waste of paged memory, in the worker's KV cache", rows)]
    name = f"{load.num_blocks * 16:,} tokens of the worker's KV cache, {load.prompt} + {load.output} tokens on average"
    report.add(name, rows, bars)
    rows = [*measure_real_sharing(model, tokens[:SHARED_PROMPT], SEQUENCES, OUTPUT)]
    report.add(f"sharing in the worker's KV cache: {SHARED_PROMPT} + {OUTPUT} tokens", rows)


def copies(report: Report, model: Model, tokens: list[int]) -> None:
    """The worker's KV cache and its host pool."""
    rows = measure_swap(model, tokens, LENGTHS, num_times=5)
    report.add("swap out and in, or recompute, by tokens in the KV cache", rows)
    report.add("break-even of swap and recompute", break_evens(rows))
    report.add("int8 in the host pool", [measure_codec(model, tokens, SEGMENT)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--model", type=Path, default=None, metavar="FOLDER", help="the default model if absent")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    home = load_settings({}).home.expanduser()
    report = Report("KV cache")
    memory(report)
    mechanisms(report)
    pool(report)
    folder = arguments.model or resolve(DEFAULT_MODEL, home).require_folder()
    model, tokens = load_model(folder, dtype="auto", device="cpu"), tokens_of(folder)
    with torch.inference_mode():
        engine(report, model, tokens)
        copies(report, model, tokens)
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
