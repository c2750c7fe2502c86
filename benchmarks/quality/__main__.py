"""What quantized weights or KV cost: perplexity and divergence against exact ones; exit code 1 if a bar is missed.

    make bench-quality    or    python -m benchmarks.quality [--quantization int8|gguf] [--kv-cache-dtype int8]
                                                             [--dtype bfloat16] [--model FOLDER]

The text is text.txt, chapters 6 and 7 of "Pride and Prejudice" (Jane Austen, 1813; public domain), 5,627 tokens of the
default model, read in segments of 512.
"""

import argparse
import inspect
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.quality.compare import compare
from benchmarks.report import Bar, Report
from services.cli.settings import load_settings
from services.gpu_worker.models.loading import load_model
from shared.model_store import DEFAULT_MODEL, resolve

TEXT = Path(__file__).with_name("text.txt")
SEGMENT = 512
CHANGE_BAR = 1.0
"""Per cent of perplexity, up or down."""
KL_BAR = 0.01
"""Nats a token."""


def measure(report: Report, folder: Path, options: argparse.Namespace) -> None:
    """One table with both models, and the bars of the quantized one."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    quantized: dict[str, Any] = {"quantization": options.quantization}
    exact = load_model(folder, dtype=options.dtype, device="cpu")
    candidate = load_model(folder, dtype=options.dtype, device="cpu", **quantized)
    kv_dtype = torch.int8 if options.kv_cache_dtype == "int8" else None
    name = f"weights {options.quantization}, KV {options.kv_cache_dtype}"
    found = compare(exact, candidate, tokens, SEGMENT, kv_dtype=kv_dtype)
    before, after = found.perplexities
    row = {
        "weights": options.quantization,
        "KV": options.kv_cache_dtype,
        f"perplexity {options.dtype}": before,
        "perplexity": after,
        "change %": 100 * found.change,
        "mean KL": found.mean_kl,
        "same likeliest token %": 100 * found.num_agreed / found.num_predicted,
        "tokens predicted": float(found.num_predicted),
    }
    bars = [
        Bar(f"perplexity of {name}, change up or down", 100 * abs(found.change), CHANGE_BAR, "%"),
        Bar(f"mean KL of {name}", found.mean_kl, KL_BAR, "nats a token"),
    ]
    report.add(f"{exact.fingerprint} against {candidate.fingerprint}", [row], bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", default="int8", choices=["none", "int8", "gguf"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--dtype", default="bfloat16", help="of the exact weights")
    parser.add_argument("--model", type=Path, default=None, metavar="FOLDER", help="the default model if absent")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = Report("quality")
    if "quantization" in inspect.signature(load_model).parameters:
        home = load_settings({}).home.expanduser()
        measure(report, options.model or resolve(DEFAULT_MODEL, home).require_folder(), options)
    else:
        report.lacks(f"{options.quantization}: this version loads no quantized weights")
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
