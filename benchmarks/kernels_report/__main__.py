"""Registers, shared memory and spills of every Triton kernel at its default tiles, without a GPU.

Exits with 1 if a kernel spills on sm_90. `-` stands where a target has no such type (fp8 on sm_80).
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.kernels_report.cases import all_cases
from benchmarks.kernels_report.compiling import TARGETS, Resources, compile_case
from benchmarks.report import Bar, Report, Row

_NO_SPILLS = "sm_90"


def main() -> int:
    options = _options()
    report = Report("Triton kernels, compiled ahead of time")
    names = [case.name for case in all_cases() if options.only in case.name]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for target in options.targets:
            results = list(pool.map(compile_case, names, [target] * len(names)))
            spilled = sum(result.spilled for result in results if result is not None)
            bars = [Bar(f"spills on {target}", spilled, 0, "bytes")] if target == _NO_SPILLS else []
            report.add(target, [_row(name, result) for name, result in zip(names, results, strict=True)], bars)
    return report.finish(options.json)


def _row(name: str, result: Resources | None) -> Row:
    if result is None:
        return {"kernel": name, "registers": None, "shared KiB": None, "spilled": None}
    return {
        "kernel": name,
        "registers": result.registers,
        "shared KiB": result.shared_bytes / 1024,
        "spilled": result.spilled,
    }


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernels_report", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--only", default="", help="kernels whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
