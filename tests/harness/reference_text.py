"""What Transformers generates for fixed prompts, each alone, in float32, and how to ask a stack for the same.

Prompt lengths sit on and around block and chunk boundaries.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from shared.records import RequestRecord, read_record
from shared.redis_client import connect
from tests.harness.stack import LogWatch, Stack

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 300, 450, 700, 900)
OUTPUT_TOKENS = 48
WORDS = "the history of science shows that people learn how water moves under mountains and long rivers"


def make_prompts(model_folder: Path) -> list[list[int]]:
    """Prompts of ordinary words, cut to exact token lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    rng = random.Random(0)
    words = WORDS.split()
    text = " ".join(rng.choice(words) for _ in range(4000))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = [rng.randrange(len(ids) - length) for length in LENGTHS]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def greedy_references(model_folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What Transformers generates for each prompt alone: `OUTPUT_TOKENS`, EOS masked, so that the first n of them are
    what a request for n would get."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            full = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT_TOKENS,
                min_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
            )
        out.append(full[0, len(prompt) :].tolist())
    return out


def generate_all(
    stack: Stack, prompts: list[list[int]], longest_first_every_s: float = 0.0, num_tokens: int = OUTPUT_TOKENS
) -> tuple[list[list[int]], LogWatch]:
    """Send all prompts at once; the committed token ids of each, read from its record, and what crossed the log.

    `longest_first_every_s`: one after the other instead, the last of `prompts` first.
    """
    # `min_tokens` masks EOS exactly as Transformers' `min_new_tokens` does.
    body = {"max_tokens": num_tokens, "min_tokens": num_tokens, "temperature": 0}
    bodies = [{**body, "prompt": prompt} for prompt in prompts]
    with stack.watch_log() as watch:
        answers = asyncio.run(complete_all(stack, bodies, longest_first_every_s))
        stack.wait_idle()
    assert all(answer["usage"]["completion_tokens"] == num_tokens for answer in answers)
    return [list(record.output) for record in records_of(stack, [answer["id"] for answer in answers])], watch


async def complete_all(
    stack: Stack, bodies: Sequence[Mapping[str, Any]], last_first_every_s: float = 0.0
) -> list[dict[str, Any]]:
    """Post all bodies to /v1/completions at once, or one after the other, the last first; the answers in order."""

    async def one(client: httpx.AsyncClient, body: Mapping[str, Any], place: int) -> dict[str, Any]:
        await asyncio.sleep(last_first_every_s * (len(bodies) - 1 - place))
        answer = await client.post("/v1/completions", json={"model": stack.model, **body})
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    async with httpx.AsyncClient(base_url=stack.url, timeout=280) as client:
        return await asyncio.gather(*(one(client, body, place) for place, body in enumerate(bodies)))


def records_of(stack: Stack, request_ids: Sequence[str]) -> list[RequestRecord]:
    """The records of requests, which must be there."""
    redis = connect(stack.redis_url)
    records = [read_record(redis, stack.keys, request_id) for request_id in request_ids]
    redis.close()
    assert all(record is not None for record in records)
    return [record for record in records if record is not None]
