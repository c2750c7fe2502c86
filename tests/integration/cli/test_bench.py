"""The load generator against a server with known words and timing."""

import json
import subprocess
import sys

import pytest

from services.cli.bench import Load, make_bodies, percentile, run_load, spread
from services.cli.ports import free_port
from tests.harness.fake_openai import fake_openai


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_counts_and_times_are_those_of_the_server() -> None:
    with fake_openai(words=tuple("abcde"), delay_s=0.05) as fake:
        report = await run_load(Load(fake.url, "tiny", num_requests=8, concurrency=4, output_tokens=5))
    assert (report.requests, report.completed, report.errors) == (8, 8, 0)
    assert (report.output_tokens, report.prompt_tokens) == (40, 56)
    assert fake.peak == 4
    assert 50 <= report.ttft_ms["p50"] < 150
    assert 40 <= report.itl_ms["p50"] < 90
    assert 40 <= report.tpot_ms["mean"] < 90
    assert report.output_tokens_per_s == pytest.approx(40 / report.duration_s, rel=0.01)


async def test_requests_are_greedy_and_ignore_eos() -> None:
    with fake_openai() as fake:
        await run_load(Load(fake.url, "tiny", num_requests=1, prompt_tokens=9, output_tokens=3))
    body = fake.requests[0]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], body["stream"]) == (0, True, 3, True)
    assert len(body["prompt"]) == 9


async def test_failures_are_counted_and_kept_out_of_the_times() -> None:
    with fake_openai(fail_every=3) as fake:
        report = await run_load(Load(fake.url, "tiny", num_requests=9, concurrency=2))
    assert (report.completed, report.errors) == (6, 3)
    assert report.error_messages == {"HTTP 429: queue is full": 3}
    assert report.output_tokens == 18


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    with fake_openai(break_off=True) as fake:
        report = await run_load(Load(fake.url, "tiny", num_requests=2))
    assert report.error_messages == {"stream ended without [DONE]": 2}
    assert report.ttft_ms == {}


async def test_no_server_is_an_error_per_request() -> None:
    report = await run_load(Load(f"http://127.0.0.1:{free_port()}", "tiny", num_requests=2))
    assert report.errors == 2


def test_prompts_are_equal_for_equal_seeds() -> None:
    load, other = Load("", "m", num_requests=5, seed=1), Load("", "m", num_requests=5, seed=2)
    assert make_bodies(load) == make_bodies(load)
    assert make_bodies(load) != make_bodies(other)
    assert {len(body["prompt"].split()) for body in make_bodies(load)} == {load.prompt_words}


def test_percentiles_are_nearest_ranks() -> None:
    ordered = [float(n) for n in range(1, 101)]
    assert (percentile(ordered, 50), percentile(ordered, 99), percentile([3.0], 99)) == (50.0, 99.0, 3.0)
    assert spread([0.002, 0.001, 0.003]) == {"mean": 2.0, "p50": 2.0, "p99": 3.0}


def test_the_command_prints_one_json_object() -> None:
    with fake_openai() as fake:
        done = bench("--url", fake.url, "--requests", "4", "--concurrency", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["completed"], report["output_tokens"]) == (4, 12)
    assert {"p50", "p99"} <= report["ttft_ms"].keys() & report["itl_ms"].keys()
    assert fake.requests[0]["model"] == "tiny"


def test_the_command_fails_if_a_request_failed() -> None:
    with fake_openai(fail_every=2) as fake:
        assert bench("--url", fake.url, "--requests", "2", "--json").returncode == 1
