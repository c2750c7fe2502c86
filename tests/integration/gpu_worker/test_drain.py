"""SIGTERM to one of two real workers under a real scheduler: the other one goes on with every text (cases 98, 99)."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from shared.keys import Keys
from shared.messages import Decoder, EventKind, LogMessage, Submission, TickEntry, WorkerFenced
from shared.packing import pack_int32
from shared.records import read_record
from shared.redis_client import connect_async
from shared.sampling import SamplingParams
from shared.scripts import read_fence, submit
from shared.streams import scan
from tests.integration.gpu_worker.test_worker_process import wait_for

if TYPE_CHECKING:
    from tests.integration.gpu_worker.conftest import WorkerProcess

ROOT = Path(__file__).parents[3]
NUM_TOKENS = 1500
_log: Decoder[LogMessage] = Decoder(LogMessage)


@pytest.fixture
def scheduler(redis_url: str, keys: Keys, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    settings = {"REDIS_URL": redis_url, "POOL": keys.pool, "MAX_NUM_SEQS": 8, "MAX_NUM_BATCHED_TOKENS": 64}
    environment = os.environ | {f"PAGEWIRE_{name}": str(value) for name, value in settings.items()}
    with (tmp_path / "scheduler.log").open("wb") as output:
        command = [sys.executable, "-m", "services.scheduler"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=output, stdout=output)
    yield process
    process.kill()
    process.wait()
    print((tmp_path / "scheduler.log").read_text())


def send(url: str, keys: Keys, names: list[str]) -> None:
    async def run() -> None:
        client = connect_async(url)
        for name in names:
            prompt = pack_int32([5 + (int(name.split("-")[1]) * 7 + i) % 80 for i in range(20)])
            params = SamplingParams(max_tokens=NUM_TOKENS, seed=1, temperature=0.0, ignore_eos=True)
            await submit(client, keys, Submission(name, "m", "completion", time.time(), prompt, params), ttl_s=600)
        await client.aclose()

    asyncio.run(run())


def outputs(client: redis.Redis, keys: Keys, names: list[str]) -> dict[str, list[int]]:
    """Whole outputs, once all have ended."""
    records = {name: read_record(client, keys, name) for name in names}
    return {n: list(r.output) for n, r in records.items() if r is not None and r.final is not None}


@pytest.mark.slow
def test_texts_go_on_at_another_worker_when_one_gets_sigterm(
    redis_url: str,
    redis_client: redis.Redis,
    keys: Keys,
    start_worker: Callable[..., "WorkerProcess"],
    scheduler: "subprocess.Popen[bytes]",
) -> None:
    workers = [
        start_worker(name=f"worker-{i}", instance=f"w{i}", worker_index=i, num_workers=2, num_blocks=1000)
        for i in range(2)
    ]
    wait_for(lambda: len([w for w in read_fence(redis_client, keys).workers.values() if w.holder]) == 2, "both joined")
    moved = [f"moved-{number}" for number in range(6)]
    send(redis_url, keys, moved)
    wait_for(lambda: read_fence(redis_client, keys).workers["worker-0"].step > 20, "steps")
    began = time.monotonic()
    workers[0].process.send_signal(signal.SIGTERM)
    assert workers[0].process.wait(10) == 0
    assert time.monotonic() - began < 5, "it does not wait for texts to end"
    assert outputs(redis_client, keys, moved) == {}, "they were short"
    wait_for(lambda: len(outputs(redis_client, keys, moved)) == 6, "all ended", timeout_s=120)

    messages = [_log.decode(entry.payload) for entry in scan(redis_client, keys.steps)]
    events = [event for message in messages if isinstance(message, TickEntry) for event in message.events]
    handed_over = [e for e in events if e.kind is EventKind.PREEMPTED and e.reason == "drain"]
    assert handed_over and max(event.num_output_tokens for event in handed_over) > 10
    assert [m.reason for m in messages if isinstance(m, WorkerFenced) and m.worker == "worker-0"][-1] == "drained"

    alone = [name.replace("moved", "alone") for name in moved]
    send(redis_url, keys, alone)
    wait_for(lambda: len(outputs(redis_client, keys, alone)) == 6, "the same again", timeout_s=120)
    told, again = outputs(redis_client, keys, moved), outputs(redis_client, keys, alone)
    assert [told[name] for name in moved] == [again[name] for name in alone]
    assert all(len(output) == NUM_TOKENS for output in told.values())
