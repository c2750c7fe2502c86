"""A stack of its own under load over HTTP, at several concurrencies: what clients get.

    python -m benchmarks.http_load [--concurrency 1 8 32 64] [--floor 32:100] [options of `pagewire up`]

100-word random prompts, 64 output tokens, greedy. Prints one JSON line per concurrency. With `--floor C:N` the exit
code is 1 if concurrency C reaches fewer than N output tokens a second.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from services.cli.bench import Load, Report, run_load
from services.cli.ports import free_port
from services.cli.settings import load_settings
from tests.harness.stack import running_stack

MIN_REQUESTS = 4
REQUESTS_PER_STREAM = 2


def measure(url: str, model: str, concurrency: int) -> Report:
    """One run of twice as many requests as streams."""
    num_requests = max(MIN_REQUESTS, REQUESTS_PER_STREAM * concurrency)
    load = Load(url=url, model=model, num_requests=num_requests, concurrency=concurrency, prompt_words=100)
    return asyncio.run(run_load(load))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--floor", default="", metavar="C:N")
    options, flags = parser.parse_known_args()
    up = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    concurrency_of_floor, floor = map(int, options.floor.split(":")) if options.floor else (0, 0)
    home = load_settings({}).home.expanduser()
    is_low = False
    with tempfile.TemporaryDirectory() as folder, running_stack(Path(folder), free_port(), home, **up) as stack:
        measure(stack.url, stack.model, 4)
        for concurrency in options.concurrency:
            report = measure(stack.url, stack.model, concurrency)
            print(msgspec.json.encode(report).decode(), flush=True)
            is_low |= concurrency == concurrency_of_floor and report.output_tokens_per_s < floor
            is_low |= report.errors > 0
    return int(is_low)


if __name__ == "__main__":
    sys.exit(main())
