"""What a gateway process costs for each streamed event: a scripted pool writes steps, a client reads the streams.

    make bench-gateway    or    python -m benchmarks.gateway_events [--streams 1 16 64] [--step-ms 10] [--profile FILE]

Counted is the CPU time of the gateway alone. Exit code 1 if an event costs more than 100 µs at the most streams: less
than 10,000 events a second and core.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import redis

from benchmarks.report import Bar, Report, Value
from benchmarks.termination import exit_on_sigterm
from services.cli.bench import Load, run_load
from services.cli.ports import free_port
from services.cli.redis_server import find_redis_server
from services.cli.settings import load_settings
from shared.keys import Keys
from shared.messages import EndReason, Submission
from shared.model_store import DEFAULT_MODEL, resolve
from tests.fakes.scripted_pool import Script, ScriptedPool

OUTPUT_TOKENS = 128
REQUESTS_PER_STREAM = 2
EVENT_BAR_US = 100.0
POOL = "bench"


@contextmanager
def own_redis() -> Iterator[str]:
    """The URL of a Redis of one's own."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(find_redis_server().path), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        process = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: redis.Redis(port=port).ping())
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def gateway(redis_url: str, model: Path, profile: Path | None) -> Iterator[tuple[str, psutil.Process]]:
    """URL and process of a gateway."""
    port = free_port()
    settings = {"PORT": port, "REDIS_URL": redis_url, "POOL": POOL, "MODEL": model, "LOG_LEVEL": "warning"}
    profiler = ["-m", "cProfile", "-o", str(profile)] if profile else []
    process = subprocess.Popen(
        [sys.executable, *profiler, "-m", "services.gateway"],
        env=os.environ | {f"PAGEWIRE_{name}": str(value) for name, value in settings.items()},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == httpx.codes.OK)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def wait_until(is_there: Callable[[], object], seconds: float = 30.0) -> None:
    """Until the call answers something true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if is_there():
                return
        except (httpx.HTTPError, redis.RedisError):
            pass
        time.sleep(0.05)
    raise TimeoutError("it does not start")


def script_of(submission: Submission) -> Script:
    """Ordinary tokens, to the full length."""
    draw = sum(submission.prompt_tokens)
    tokens = [1000 + (draw + 7919 * index) % 20000 for index in range(submission.params.max_tokens)]
    return Script(tokens, EndReason.LENGTH)


def measure(url: str, process: psutil.Process, streams: int) -> dict[str, Value]:
    """One load; CPU time of the gateway for it."""
    before = process.cpu_times()
    load = Load(
        url=url,
        model=httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
        num_requests=REQUESTS_PER_STREAM * streams,
        concurrency=streams,
        output_tokens=OUTPUT_TOKENS,
    )
    report = asyncio.run(run_load(load))
    after = process.cpu_times()
    if report.errors:
        raise RuntimeError(f"{report.errors} requests failed: {report.error_messages}")
    user, system = after.user - before.user, after.system - before.system
    return {
        "streams": float(streams),
        "events/s": report.output_tokens_per_s,
        "CPU µs an event": 1e6 * (user + system) / report.output_tokens,
        "of it in the kernel": 1e6 * system / report.output_tokens,
        "p99 ITL ms": report.itl_ms["p99"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--profile", type=Path, default=None, metavar="FILE", help="where the gateway's time went")
    options = parser.parse_args()
    exit_on_sigterm()
    model = resolve(DEFAULT_MODEL, load_settings({}).home.expanduser()).require_folder()
    report = Report("gateway")
    with (
        own_redis() as redis_url,
        ScriptedPool(redis_url, Keys(POOL), script_of, step_s=options.step_ms / 1e3, max_model_len=8192),
        gateway(redis_url, model, options.profile) as (url, process),
    ):
        measure(url, process, 4)
        rows = [measure(url, process, streams) for streams in options.streams]
    bar = Bar(f"an event at {options.streams[-1]} streams", float(rows[-1]["CPU µs an event"] or 0), EVENT_BAR_US, "µs")
    report.add("a streamed event", rows, [bar])
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
