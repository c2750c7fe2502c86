"""Workers that die of what they compute: of memory that there is not, or of one request again and again. The streams
beside it go on to exactly their texts."""

import asyncio
import json
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from services.cli.ports import free_port
from shared.fault_points import FaultPoint
from shared.messages import Decoder, FinishReason, UsageRecord
from shared.redis_client import connect
from shared.streams import scan
from tests.harness.fault_model import TINY, prepare_model
from tests.harness.stack import Stack, running_stack

STREAMS, OUTPUT_TOKENS, LONG_PROMPT = 4, 160, 4000


@dataclass
class Told:
    """What a stream told."""

    request_id: str = ""
    text: str = ""
    reasons: list[str] = field(default_factory=list)
    error: str = ""
    is_done: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("deaths")
    model, faults = folder / "model", folder / "faults"
    prepare_model(TINY, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    faults.mkdir()
    flags = {
        "max_num_batched_tokens": 4096,
        "max_model_len": 4400,
        "num_blocks": 600,
        "itl_target_s": 0,
        "max_worker_deaths": 3,
    }
    variables = {"PAGEWIRE_FAULT_DIR": str(faults)}
    with running_stack(folder, free_port(), folder, variables, model=model, dtype="float32", **flags) as running:
        yield running


async def tell(client: httpx.AsyncClient, told: Told, **body: Any) -> None:
    always = {"model": "model", "ignore_eos": True, "temperature": 0, "stream": True}
    asked = {**always, "max_tokens": OUTPUT_TOKENS, **body}
    try:
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200, await answer.aread()
            told.request_id = answer.headers["x-request-id"]
            async for line in answer.aiter_lines():
                take(told, line)
    except httpx.RemoteProtocolError:
        assert told.error, "cut without an error"


def take(told: Told, line: str) -> None:
    told.is_done |= line == "data: [DONE]"
    if not line.startswith("data: {"):
        return
    event = json.loads(line[6:])
    told.error = event.get("error", {}).get("code", "")
    for choice in event.get("choices", ()):
        told.text += choice["text"]
        told.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    if len(told.text) > 10:
        told.begun.set()


async def streams_beside(stack: Stack, disturb: Any = None) -> list[Told]:
    """Of `STREAMS` streams; `disturb` is awaited with the client while they run."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=100) as client:
        told = [Told() for _ in range(STREAMS)]
        prompts = [f"Chapter {index}. The ship" for index in range(STREAMS)]
        running = [asyncio.create_task(tell(client, t, prompt=p)) for t, p in zip(told, prompts, strict=True)]
        for one in told:
            await one.begun.wait()
        if disturb is not None:
            await disturb(client)
        await asyncio.gather(*running)
        return told


def limit_data(pid: int) -> None:
    """To what it has, and a little."""
    with open(f"/proc/{pid}/status") as status:
        written = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    limit = written + (2 << 20)
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))


def logs_of(stack: Stack) -> str:
    return "".join(path.read_text() for path in (stack.state_dir / "logs").iterdir())


def check(found: list[Told], wanted: list[Told]) -> None:
    assert [told.text for told in found] == [told.text for told in wanted]
    assert all(told.reasons == ["length"] and told.is_done and not told.error for told in found)


async def watch_health(client: httpx.AsyncClient, seen: dict[str, set[tuple[int, str]]]) -> None:
    """(status, reason) of both endpoints, until cancelled."""
    while True:
        for name in ("live", "ready"):
            answer = await client.get(f"/health/{name}")
            seen.setdefault(name, set()).add((answer.status_code, answer.json().get("reason", "")))
        await asyncio.sleep(0.05)


@pytest.mark.timeout(180)
def test_a_step_without_memory_costs_nobody_a_token(stack: Stack) -> None:
    """A limit on the running process, so that the tensors of a long prompt do not fit: the allocator's own error, in a
    step that serves others too. What the kernel does instead, SIGKILL, is below. Case 8, and BEST-01: meanwhile health
    says that there is no worker, and that the gateway lives."""
    wanted, big = asyncio.run(streams_beside(stack)), Told()
    long = {"prompt": [65 + number % 26 for number in range(LONG_PROMPT)], "max_tokens": 12}
    (worker,), seen = stack.pids()["gpu_worker"], dict[str, set[tuple[int, str]]]()

    async def exhaust(client: httpx.AsyncClient) -> None:
        limit_data(worker)
        watching = asyncio.create_task(watch_health(client, seen))
        await tell(client, big, **long)
        watching.cancel()

    check(asyncio.run(streams_beside(stack, exhaust)), wanted)
    assert stack.wait_pids("gpu_worker") != [worker]
    assert "kind=out_of_memory" in logs_of(stack)
    assert big.reasons == ["length"] and not big.error
    assert seen["live"] == {(200, "")} and {status for status, _ in seen["ready"]} == {200, 503}
    assert all(reason for status, reason in seen["ready"] if status == 503)
    stack.wait_idle()


@pytest.mark.timeout(180)
def test_a_request_that_kills_every_worker_ends_and_the_others_go_on(stack: Stack, tmp_path_factory: Any) -> None:
    """Its client gets one error in a stream that is cut (BEST-16)."""
    wanted, poison = asyncio.run(streams_beside(stack)), Told()
    fault = stack.state_dir.parent / "faults" / FaultPoint.STEP_BEGUN

    async def kill(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(tell(client, poison, prompt="A request that", max_tokens=400))
        await poison.begun.wait()
        fault.write_text(f"SIGKILL {poison.request_id}")
        await running

    try:
        found = asyncio.run(streams_beside(stack, kill))
    finally:
        fault.unlink()
    check(found, wanted)
    assert logs_of(stack).count("request_condemned") == 1
    assert poison.error == "worker_died" and not poison.reasons and not poison.is_done
    stack.wait_idle()
    told = httpx.get(f"{stack.url}/v1/requests/{poison.request_id}").json()
    assert told["finish_reasons"] == ["error"]
    client = connect(stack.redis_url)
    decoder: Decoder[UsageRecord] = Decoder(UsageRecord)
    records = [decoder.decode(payload) for _, payload in scan(client, stack.keys.usage)]
    client.close()
    assert [r.reason for r in records if r.request_id == poison.request_id] == [FinishReason.ERROR]
