"""The worker's engine: a step and its parts, and what the log in the middle costs; exit code 1 if a bar is missed.

    make bench-engine    or    python -m benchmarks.engine_step [--rows 1 8 …] [--rounds 3] [options of `pagewire up`]

First one engine alone, by number of rows. Then, in turns, the same load in-process (engine and scheduler core in one
process) and through HTTP and Redis: 100-word prompts, 64 output tokens, greedy. The stack shares its cores with the
client that loads it.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.engine_step.in_process import in_process
from benchmarks.engine_step.over_http import AROUND, Usage, run
from benchmarks.engine_step.steps import Steps, measure_steps
from benchmarks.report import Bar, Report
from benchmarks.termination import exit_on_sigterm
from services.cli.bench import Load, make_bodies
from services.cli.ports import free_port
from services.cli.settings import load_settings
from services.gpu_worker.cache.kv_cache import KVCache, cache_dtype
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.profile import Part
from shared.model_store import DEFAULT_MODEL, resolve
from tests.harness.stack import running_stack

BLOCK_SIZE = 16
MAX_LENGTH = 2048
OUTPUT_TOKENS = 64
PROMPT_WORDS = 100
REQUESTS_PER_STREAM = 2
NUM_BLOCKS = 2048
"""Of both engines: room for every stream."""
OF_IN_PROCESS, OF_CPU, OF_STEP = 88.0, 10.0, 3.0
"""Bars, in per cent."""


def alone(report: Report, folder: Path, options: argparse.Namespace, quantization: str) -> None:
    """One engine by number of rows."""
    steps = Steps(steps=options.steps, temperature=options.temperature)
    model = load_model(folder, dtype=options.dtype, device=options.device, quantization=quantization)
    num_blocks = -(-(steps.prompt + steps.steps + max(options.rows) + 2) // BLOCK_SIZE) * max(options.rows)
    dtype = cache_dtype(model.stored_dtype, model.dtype, model.config, BLOCK_SIZE, model.device)
    cache = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, dtype, model.device)
    engine = Engine(model, cache, EngineConfig(max(options.rows), MAX_LENGTH, steps.chunk))
    engine.warm_up()
    print(f"{model.fingerprint}, {options.threads} threads, prompts of {steps.prompt} tokens, {steps.steps} steps")
    with torch.inference_mode():
        report.add("a decode step", [measure_steps(engine, rows, steps) for rows in options.rows])


def prompts_of(folder: Path, load: Load) -> list[list[int]]:
    """The prompts of an HTTP load as its gateway reads them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [list(tokenizer.encode(body["prompt"]).ids) for body in make_bodies(load)]


def compare(report: Report, folder: Path, home: Path, options: argparse.Namespace, up: Mapping[str, str]) -> None:
    """In-process and through the stack, in turns."""
    streams = options.concurrency
    worker = {"home": home, "max_num_seqs": max(64, streams), "num_blocks": NUM_BLOCKS, "device": options.device}
    flags = {**worker, "dtype": options.dtype, **{name.replace("-", "_"): value for name, value in up.items()}}
    del flags["home"]
    inside: list[float] = []
    usages: list[Usage] = []
    with (
        tempfile.TemporaryDirectory() as state,
        in_process({**flags, "home": home}) as engine,
        running_stack(Path(state), free_port(), home, **flags) as stack,
    ):
        for number in range(options.rounds + 1):
            load = Load(
                url=stack.url,
                model=stack.model,
                num_requests=max(4, REQUESTS_PER_STREAM * streams),
                concurrency=streams,
                prompt_words=PROMPT_WORDS,
                output_tokens=OUTPUT_TOKENS,
                seed=number,  # no prompt comes twice: nothing is found in the prefix cache
            )
            run_inside = engine.run(streams, prompts_of(folder, load), OUTPUT_TOKENS)
            usage = run(stack, load)
            if number:  # the first round warms up
                inside.append(run_inside["output_tokens"] / run_inside["seconds"])
                usages.append(usage)
    report_comparison(report, streams, inside, usages)


def report_comparison(report: Report, streams: int, inside: list[float], usages: list[Usage]) -> None:
    """Tables of the medians, and the bars."""
    outside = [usage.report.output_tokens_per_s for usage in usages]
    of_inside = 100 * statistics.median(o / i for o, i in zip(outside, inside, strict=True))
    around = 100 * statistics.median(usage.share_around for usage in usages)
    waiting = 100 * statistics.median(usage.plan_wait for usage in usages)
    row = {
        "in-process tokens/s": statistics.median(inside),
        "HTTP + Redis tokens/s": statistics.median(outside),
        "of in-process %": of_inside,
        **{f"{service} CPU %": 100 * _share(usages, service) for service in (*AROUND, "gpu_worker")},
    }
    bars = [
        Bar(f"HTTP + Redis at {streams} streams, of in-process", of_inside, OF_IN_PROCESS, "%", at_least=True),
        Bar(f"CPU time of {', '.join(AROUND)}", around, OF_CPU, "%"),
        Bar("plan wait, of step time", waiting, OF_STEP, "%"),
    ]
    report.add(f"the same load, {streams} streams, medians of {len(usages)}", [row], bars)
    steps = statistics.median(usage.parts[Part.STEP] for usage in usages)
    shares = {f"{part} %": 100 * statistics.median(u.parts[part] for u in usages) / steps for part in Part}
    report.add("parts of the worker's turns under that load, of step time", [shares])


def _share(usages: list[Usage], service: str) -> float:
    return statistics.median(usage.cpu[service] / sum(usage.cpu.values()) for usage in usages)


def parse() -> tuple[argparse.Namespace, dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, metavar="FOLDER", help="the default model if absent")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64], help="none: only the comparison")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison; 0: only the engine alone")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there as well")
    options, flags = parser.parse_known_args()
    return options, {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}


def main() -> int:
    exit_on_sigterm()
    options, up = parse()
    torch.set_num_threads(options.threads)
    home = load_settings({}).home.expanduser()
    folder = options.model or resolve(DEFAULT_MODEL, home).require_folder()
    report = Report("engine")
    if options.rows:
        alone(report, folder, options, up.get("quantization", "none"))
    if options.rounds:
        compare(report, folder, home, options, up)
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
