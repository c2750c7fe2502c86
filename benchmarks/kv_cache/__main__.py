"""What the KV cache's mechanisms are worth; exit code 1 if a bar is missed.

    make bench-kv            or    python -m benchmarks.kv_cache [--json FILE] [--model FOLDER]

From the simulator (the real core in virtual time): memory, hit rates. From the real block pool: cost of a block,
contiguity. From the real model: swap or recompute, int8. About two minutes.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.kv_cache.engine_kv import break_even, measure_codec, measure_swap, tokens_of
from benchmarks.kv_cache.pool_bench import measure_pool
from benchmarks.kv_cache.simulated import measure_hits, measure_memory
from benchmarks.report import Bar, Report
from services.cli.settings import load_settings
from services.gpu_worker.models.loading import load_model
from services.scheduler.core.extents import Fit
from shared.model_store import DEFAULT_MODEL, resolve

WASTE_BAR = 4.0
LENGTHS = (1, 16, 64, 256, 512)
SEGMENT = 256


def simulated(report: Report) -> None:
    rows = measure_memory(num_blocks=2048, num_requests=800)
    name = "slots without a token, of those given out %"
    waste = Bar("waste of paged memory", float(rows[0][name] or 0), WASTE_BAR, "%")
    report.add("32,768 tokens of KV memory, simulated requests of 300 + 200 tokens on average", rows, [waste])
    report.add("prefix hits by eviction, simulated, 1,500 blocks", measure_hits(1500))


def pool(report: Report) -> None:
    rows = [measure_pool(fit, 4096, 1500, cached=cached) for cached in (False, True) for fit in Fit]
    report.add("the block pool, 95 % in tables, requests come and go", rows)


def engine(report: Report, folder: Path) -> None:
    model = load_model(folder, dtype="auto", device="cpu")
    tokens = tokens_of(folder)
    with torch.inference_mode():
        rows = measure_swap(model, tokens, LENGTHS, num_times=5)
        report.add("swap out and in, or recompute, by tokens in the KV cache", rows)
        for name in ("swap", "swap, int8"):
            print(f"{name} is faster from {break_even(rows, name):.0f} tokens on (of those measured)")
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
    simulated(report)
    pool(report)
    engine(report, arguments.model or resolve(DEFAULT_MODEL, home).require_folder())
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
