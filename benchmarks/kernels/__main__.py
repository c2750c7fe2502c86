"""Every kernel against what the machine can do, measured in the same run; exit code 1 if a bar is missed.

    make bench-kernels    or    python -m benchmarks.kernels [--only attention …] [--repeats 7] [--json FILE]

Limits: reading memory that no cache holds, and products in registers, on all cores, measured right before and after
each kernel. Shapes are those of the default model. On a processor without bfloat16 products, the bf16 limit is that of
float32 ones.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernels.cases import (
    ATTENTION_BAR,
    decode_attention,
    pack_blocks,
    prefill_attention,
    products,
    small_operations,
)
from benchmarks.kernels.machine import Limits, measure_machine
from benchmarks.kernels.timing import Case, bar_of, measure, row_of
from benchmarks.machine import instruction_sets
from benchmarks.report import Report
from kernels.linear.api import pack_linear
from kernels.linear.blocks import BlockForm
from services.cli.settings import load_settings
from services.gpu_worker.models.config import DecoderConfig
from services.gpu_worker.models.families import parse_config
from shared.model_store import DEFAULT_MODEL, resolve

MIN_S = 0.05
"""A kernel runs at least this long at a time."""
ROWS = (1, 4, 8, 32, 64, 512)
ATTENTION_LAYERS = 8
"""Enough to exceed every cache; all of them would take 1.5 GB."""


def cases(config: DecoderConfig) -> dict[str, Callable[[], Iterator[Case]]]:
    """By group; each makes its tensors when it is asked for them."""
    few_layers = replace(config, num_layers=ATTENTION_LAYERS)

    def attention() -> Iterator[Case]:
        yield decode_attention(few_layers, 64, 1024, ATTENTION_BAR)
        yield decode_attention(few_layers, 8, 1024, None)
        yield prefill_attention(few_layers, 4, 512)

    def blocks(form: BlockForm) -> Iterator[Case]:
        return products(config, form.lower(), partial(pack_blocks, form=form), ROWS)

    return {
        "attention": attention,
        "bf16": lambda: products(config, "bf16", pack_linear, ROWS),
        "int8": lambda: products(config, "int8", partial(pack_linear, is_int8=True), ROWS),
        **{form.lower(): partial(blocks, form) for form in BlockForm},
        "small": lambda: small_operations(config, 100_000),
    }


def run(report: Report, chosen: Sequence[str], config: DecoderConfig, repeats: int) -> None:
    limits = Limits()
    for name, make in cases(config).items():
        if name in chosen:
            timed = [(case, measure(case, limits.probe(case.limit), repeats=repeats, min_s=MIN_S)) for case in make()]
            bars = [bar for case, found in timed if (bar := bar_of(case, found)) is not None]
            report.add(name, [row_of(case, found) for case, found in timed], bars)


def main() -> int:
    home = load_settings({}).home.expanduser()
    folder = resolve(DEFAULT_MODEL, home).require_folder()
    config = parse_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), {})
    groups = list(cases(config))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    report = Report("kernels")
    with torch.inference_mode():
        report.add("limits of the machine", [measure_machine().row(Limits().level, instruction_sets())])
        run(report, options.only, config, options.repeats)
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
