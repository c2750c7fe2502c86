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
_SHORT = 129
"""Tokens of a prompt whose reference is found together with others."""
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
    """What Transformers' `generate` gives for each prompt alone: `OUTPUT_TOKENS`, EOS masked, so that the first n of
    them are what a request for n would get.

    A decode step of one row reads all weights for one token. So the texts of short prompts are found together, as a
    padded batch, and then each is proved alone: one pass over its prompt and its text must choose that text at every
    place, which is what `generate` would do there. Long ones, and one that alone has another text, are generated alone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    short = [prompt for prompt in prompts if len(prompt) <= _SHORT]
    with torch.inference_mode():
        found = {tuple(prompt): text for prompt, text in zip(short, _generate_padded(model, short), strict=True)}
        return [_proved(model, prompt, found.get(tuple(prompt))) for prompt in prompts]


def _proved(model: Any, prompt: list[int], text: list[int] | None) -> list[int]:
    if text is not None and text == _chosen_alone(model, prompt, text):
        return text
    return _generate_padded(model, [prompt])[0]


def _generate_padded(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    import torch

    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sizes = {"max_new_tokens": OUTPUT_TOKENS, "min_new_tokens": OUTPUT_TOKENS}
    texts: list[list[int]] = model.generate(ids, attention_mask=mask, do_sample=False, **sizes)[:, length:].tolist()
    return texts


def _chosen_alone(model: Any, prompt: list[int], text: list[int]) -> list[int]:
    """The likeliest token, EOS masked, at each place of `text` behind `prompt` and what precedes it in `text`."""
    import torch

    logits = model(torch.tensor([prompt + text[:-1]]), logits_to_keep=len(text)).logits[0]
    logits[:, model.generation_config.eos_token_id] = -torch.inf
    chosen: list[int] = logits.argmax(-1).tolist()
    return chosen


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
