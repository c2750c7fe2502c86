"""Many streams at once through the whole stack; afterwards nothing is left behind."""

import asyncio

import openai
import pytest

from tests.harness.stack import Stack

pytestmark = [pytest.mark.model]


@pytest.mark.timeout(300)
def test_64_concurrent_streams_finish_and_the_pool_is_idle_again(stack: Stack) -> None:
    async def run() -> list[tuple[str, str | None, int]]:
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=280)

        async def one(index: int) -> tuple[str, str | None, int]:
            stream = await client.chat.completions.create(
                model=stack.model,
                messages=[{"role": "user", "content": f"Tell me fact number {index} about rivers."}],
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            text, reason, tokens = "", None, 0
            async for chunk in stream:
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
            return text, reason, tokens

        try:
            return await asyncio.gather(*(one(i) for i in range(64)))
        finally:
            await client.close()

    answers = asyncio.run(run())
    assert all(text and reason in ("stop", "length") and 0 < tokens <= 24 for text, reason, tokens in answers)
    stack.wait_idle()
    assert stack.metric("num_requests_running") == 0 and stack.metric("num_requests_waiting") == 0
    total, free = stack.metric("kv_blocks_total"), stack.metric("kv_blocks_free")
    assert total > 0 and free + stack.metric("kv_blocks_cached") == total


@pytest.mark.timeout(120)
def test_a_client_that_leaves_frees_its_blocks(stack: Stack) -> None:
    async def leave(stream: bool) -> None:
        import httpx

        body = {"model": stack.model, "prompt": "Count:", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=stack.url, timeout=30) as client:
            if stream:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data:"):
                            return
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=body, timeout=1.5)

    for stream in (True, False):
        before = stack.metric("requests_aborted_total", reason="client_disconnect")
        asyncio.run(leave(stream))
        stack.wait_idle(seconds=10)
        assert stack.metric("requests_aborted_total", reason="client_disconnect") == before + 1
