"""Every Triton kernel on the GPU of this machine: right, and how near to the limits measured in the same run.

Takes about two minutes. Exits with 1 if a result is wrong, with 2 if there is no GPU.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.gpu_check.cases import Check, all_checks
from benchmarks.gpu_check.device import Peaks, Stopwatch, measure_peaks
from benchmarks.report import Bar, Report, Row


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no GPU here; nothing was checked", file=sys.stderr)
        return 2
    report = Report(f"Triton kernels on {torch.cuda.get_device_name()}")
    watch = Stopwatch()
    peaks = measure_peaks(watch)
    limits = {
        "bandwidth": f"{peaks.bytes_per_s / 1e9:,.0f} GB/s",
        "bfloat16": f"{peaks.flops_per_s / 1e12:,.0f} TFLOP/s",
    }
    report.add("measured limits", [limits])
    rows, bars = [], []
    for check in all_checks():
        row, bar = _measured(check, watch, peaks)
        rows.append(row)
        bars.append(bar)
    report.add("kernels", rows, bars)
    return report.finish(options.json)


def _measured(check: Check, watch: Stopwatch, peaks: Peaks) -> tuple[Row, Bar]:
    actual = check.read(check.work()).float()
    error = float((actual - check.expected).norm() / check.expected.norm())
    error = error if error == error else float("inf")
    seconds = watch.seconds(check.work)
    row: Row = {
        "kernel": check.name,
        "error": error,
        "µs": seconds * 1e6,
        "GB/s": check.num_bytes / seconds / 1e9,
        "% of bandwidth": 100 * check.num_bytes / seconds / peaks.bytes_per_s,
        "% of FLOP/s": 100 * check.flops / seconds / peaks.flops_per_s if check.flops else None,
    }
    return row, Bar(f"error of {check.name}", error, check.tolerance, "")


if __name__ == "__main__":
    raise SystemExit(main())
