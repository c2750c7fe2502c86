"""Pagewire beside vLLM and llama.cpp on this machine, with one client; exit code 1 if a bar is missed.

    benchmarks/peers/setup.sh                     once: installs the peers
    make bench-peers    or    python -m benchmarks.peers [--only NAME …] [--rounds N] [--concurrency N …]

One server at a time; every round starts each of them anew, in another order, and puts the same load on it: random
100-word prompts, 64 output tokens, greedy, `ignore_eos`. Medians over the rounds. Machines differ and are noisy: ratios
count, and the share of what this machine could give at best, which is measured in the same run.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.kernels.machine import measure_machine
from benchmarks.machine import Load as Tokens
from benchmarks.machine import Machine, ModelSize, instruction_sets
from benchmarks.peers import figures
from benchmarks.peers.servers import Contender, NotThere, contenders
from benchmarks.report import Report
from benchmarks.termination import exit_on_sigterm
from kernels.native.library import level_name
from services.cli import bench
from services.cli.settings import load_settings
from shared.model_store import DEFAULT_MODEL, resolve

MIN_REQUESTS = 4
REQUESTS_PER_STREAM = 2
PROMPT_WORDS = 100
OUTPUT_TOKENS = 64
Runs = dict[str, dict[int, list[bench.Report]]]


def load(url: str, model: str, concurrency: int, number: int) -> bench.Report:
    """One run of twice as many requests as streams.

    Every server gets the same prompts, but no prompt comes twice in the life of a server: nothing is cached.
    """
    num_requests = max(MIN_REQUESTS, REQUESTS_PER_STREAM * concurrency)
    return asyncio.run(
        bench.run_load(
            bench.Load(
                url,
                model,
                num_requests=num_requests,
                concurrency=concurrency,
                prompt_words=PROMPT_WORDS,
                output_tokens=OUTPUT_TOKENS,
                seed=1000 * number + concurrency,
            )
        )
    )


def measure(contender: Contender, concurrency: Sequence[int], number: int) -> dict[int, bench.Report]:
    """Start it, warm it up, put every load on it, stop it.

    Raises:
        NotThere: it does not run here, or it answers with errors.
    """
    found = {}
    with contender.serve() as served:
        load(served.url, served.model, 2, number)
        for streams in concurrency:
            report = load(served.url, served.model, streams, number)
            if report.errors:
                raise NotThere(f"{contender.name} failed at {streams} streams: {report.error_messages}")
            speed, gap = report.output_tokens_per_s, report.itl_ms.get("p99", 0.0)
            print(
                f"  {contender.name:14} {streams:3d} streams {speed:7.1f} tokens/s, p99 ITL {gap:6.1f} ms", flush=True
            )
            found[streams] = report
    return found


def run_rounds(chosen: Sequence[Contender], concurrency: Sequence[int], rounds: int, report: Report) -> Runs:
    """All rounds. A contender that does not run is named once and left out."""
    runs: Runs = {}
    missing: dict[str, str] = {}
    for number in range(rounds):
        shift = number % len(chosen)
        print(f"\nround {number + 1} of {rounds}", flush=True)
        for contender in [*chosen[shift:], *chosen[:shift]]:
            if contender.name in missing:
                continue
            try:
                found = measure(contender, concurrency, number)
            except NotThere as error:
                missing[contender.name] = str(error)
                report.lacks(f"{contender.name}: {error}")
                continue
            for streams, measured in found.items():
                runs.setdefault(contender.name, {}).setdefault(streams, []).append(measured)
    return {c.name: runs[c.name] for c in chosen if c.name in runs and c.name not in missing}


def middle(machines: Sequence[Machine]) -> Machine:
    """Each limit's median: other guests of a shared machine come and go."""
    return Machine(
        median(m.read_bytes_per_s for m in machines),
        median(m.bf16_flop_per_s for m in machines),
        median(m.int8_op_per_s for m in machines),
    )


def limits_of(
    chosen: Sequence[Contender], runs: Runs, machine: Machine, size: ModelSize
) -> dict[tuple[str, int], float]:
    """(contender, concurrency) → the most tokens/s that the machine could give it."""
    limits = {}
    for contender in chosen:
        for streams, (first, *_) in runs.get(contender.name, {}).items():
            tokens = Tokens(round(first.prompt_tokens / first.completed), OUTPUT_TOKENS)
            limits[contender.name, streams] = size.tokens_per_s(
                machine, tokens, streams, bits=contender.bits, is_integer=contender.is_integer
            )
    return limits


def parse(names: Sequence[str], peers: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(names)}; or a first word")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--peers", type=Path, default=peers, metavar="DIR", help="where setup.sh put them")
    parser.add_argument("--json", type=Path, default=Path("build/peers.json"), metavar="FILE")
    parser.add_argument("--plot", type=Path, default=Path("build/peers.png"), metavar="FILE")
    return parser.parse_args()


def main() -> int:
    exit_on_sigterm()
    home = load_settings({}).home.expanduser()
    folder = resolve(DEFAULT_MODEL, home).require_folder()
    options = parse([c.name for c in contenders(Path(), home, folder)], home / "peers")
    everyone = contenders(options.peers.expanduser(), home, folder)
    only = options.only
    chosen = [c for c in everyone if not only or c.name in only or c.name.split()[0] in only]
    if not chosen:
        raise SystemExit(f"error: --only {' '.join(only)}: there are {', '.join(c.name for c in everyone)}")
    report = Report("peers")
    started = time.monotonic()
    machines = [measure_machine()]
    runs = run_rounds(chosen, options.concurrency, options.rounds, report)
    machines.append(measure_machine())
    machine, medians = middle(machines), figures.medians_of(runs)
    report.add("limits of the machine", [machine.row(level_name(), instruction_sets())])
    limits = limits_of(chosen, runs, machine, ModelSize.read(folder))
    for streams in options.concurrency:
        if rows := figures.rows_of(medians, limits, streams):
            report.add(f"{streams} streams, medians of {options.rounds}", rows)
    bars, untold = figures.judge(medians, options.concurrency)
    report.bars += bars
    report.untold += untold
    for path in (options.json, options.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    if medians:
        from benchmarks.peers.plot import write_plot

        write_plot(medians, options.concurrency, options.plot)
    print(f"\n{time.monotonic() - started:.0f} s; figures in {options.json}, picture in {options.plot}")
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
