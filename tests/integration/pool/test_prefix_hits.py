"""`usage.prompt_tokens_details.cached_tokens` over HTTP: what an abort leaves behind, and whose hits are told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.tokenizer import TextTokenizer
from tests.fakes.byte_model import write_byte_model
from tests.fakes.gateway_server import RunningGateway
from tests.integration.scheduler.conftest import Pool, wait_for

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4608
PROMPT = [1 + place * place % 23 for place in range(4009)]
"""4k tokens, and a few that fill no block."""
IN_BLOCKS = 4009 // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture
def long_gateway(pool: Pool, tmp_path: Path) -> Iterator[RunningGateway]:
    """A pool for prompts of 4k tokens behind a gateway that is told tenants."""
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
    pool.worker(num_blocks=1400, max_tokens=512, **sizes)
    pool.scheduler(max_num_batched_tokens=512, **sizes).start()
    folder = write_byte_model(tmp_path, MAX_MODEL_LEN)
    tokenizer = TextTokenizer.from_folder(folder)
    options = {"redis_url": pool.url, "pool": pool.keys.pool, "tenant_header": "X-Tenant"}
    with RunningGateway(tokenizer, model=folder, **options) as gateway:
        yield gateway.wait_ready()


def complete(gateway: RunningGateway, prompt: list[int], tenant: str = "", **fields: Any) -> tuple[str, int]:
    """(text, cached tokens) of 20 tokens."""
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, **fields}
    answer = gateway.http.post("/v1/completions", json=body, headers={"x-tenant": tenant} if tenant else {})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def leave_after(gateway: RunningGateway, prompt: list[int], num_tokens: int) -> None:
    """A client that reads a stream up to so many tokens, and is gone."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True, "stream_options": options}
    with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["usage"]["completion_tokens"] >= num_tokens:
                return
    raise AssertionError("it ended by itself")


def test_an_aborted_4k_prompt_is_still_cached_when_it_comes_again(pool: Pool, long_gateway: RunningGateway) -> None:
    """BEST-09: half an hour of prefill was thrown away by an interrupt. Aborted after 30 tokens, sent again with a
    suffix, and the text is that of a prompt that was never cached."""
    pool.workers[0]._step_s = 0.005  # it must not end before its client has left
    leave_after(long_gateway, PROMPT, 30)
    wait_for(lambda: pool.health() and long_gateway.metric("requests_aborted_total", reason="client_disconnect") == 1)
    again = [*PROMPT, 7, 8, 9]
    text, cached = complete(long_gateway, again)
    assert cached == IN_BLOCKS >= 4000 // BLOCK_SIZE * BLOCK_SIZE
    assert complete(long_gateway, again, cache_salt="nobody else's") == (text, 0)


def test_cached_tokens_are_those_of_the_own_domain(long_gateway: RunningGateway) -> None:
    """Case 72: what another tenant, or the same one under another salt, has cached is neither used nor told."""
    domains: list[tuple[str, dict[str, str]]] = [
        ("alice", {}),
        ("bob", {}),
        ("", {}),
        ("alice", {"cache_salt": "s"}),
        ("alic", {"cache_salt": "es"}),
    ]
    cold = [complete(long_gateway, PROMPT, tenant, **salt) for tenant, salt in domains]
    assert [cached for _, cached in cold] == [0] * len(domains)
    warm = [complete(long_gateway, PROMPT, tenant, **salt) for tenant, salt in domains]
    assert [cached for _, cached in warm] == [IN_BLOCKS] * len(domains)
    assert len({text for text, _ in [*cold, *warm]}) == 1
