"""`use_beam_search` over the whole stack equals Transformers' beam search, in float32, through the HTTP answer."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.text.tokenizer import TextTokenizer
from shared.messages import CopyKind
from tests.harness.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are red,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "The old lighthouse keeper opened the door and looked out over the",
]
PENALTIES = [1.0, 0.0, 1.0, 1.0, 2.0, 1.0, 0.0, 1.0]
"""By prompt."""
BEAMS, RESULTS, OUTPUT_TOKENS = 4, 2, 24


def transformers_search(folder: Path, prompts: list[list[int]]) -> list[list[list[int]]]:
    """By prompt, its best results: token ids, with the ending token if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos = model.generation_config.eos_token_id
    found = []
    for prompt, length_penalty in zip(prompts, PENALTIES, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            rows = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT_TOKENS,
                num_beams=BEAMS,
                num_return_sequences=RESULTS,
                do_sample=False,
                early_stopping=False,
                length_penalty=length_penalty,
                pad_token_id=eos,
            )
        found.append([_cut(row[len(prompt) :].tolist(), eos) for row in rows])
    return found


def _cut(tokens: list[int], eos: int) -> list[int]:
    """Without what pads a result that ended early."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


async def search(stack: Stack, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """All prompts at once, each a request of its own."""
    options = {"use_beam_search": True, "best_of": BEAMS, "n": RESULTS, "max_tokens": OUTPUT_TOKENS}

    async def one(client: httpx.AsyncClient, prompt: list[int], length_penalty: float) -> dict[str, Any]:
        body = {"model": stack.model, "prompt": prompt, "length_penalty": length_penalty, **options}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    async with httpx.AsyncClient(base_url=stack.url, timeout=280) as client:
        return await asyncio.gather(*(one(client, *each) for each in zip(prompts, PENALTIES, strict=True)))


@pytest.mark.timeout(400)
def test_eight_searches_at_once_find_what_transformers_finds(float_stack: Stack, model_folder: Path) -> None:
    tokenizer = TextTokenizer.from_folder(model_folder)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    wanted = transformers_search(model_folder, prompts)
    with float_stack.watch_log() as watch:
        answers = asyncio.run(search(float_stack, prompts))
        float_stack.wait_idle()
    for prompt, answer, results in zip(prompts, answers, wanted, strict=True):
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == sum(map(len, results))
        for rank, (choice, tokens) in enumerate(zip(answer["choices"], results, strict=True)):
            whole = tokenizer.decode(prompt + tokens)
            assert choice["index"] == rank and tokenizer.decode(prompt) + choice["text"] == whole
            assert choice["finish_reason"] == ("length" if len(tokens) == OUTPUT_TOKENS else "stop")
    assert sum(len(plan.beams) for plan, _ in watch.plans) > 8 * BEAMS, "beams were meant to advance"
    copied = [pair for plan, _ in watch.plans for pair in plan.copies if pair.kind is CopyKind.WITHIN]
    assert copied, "beams were meant to part inside a block"
    total, free = float_stack.metric("kv_blocks_total"), float_stack.metric("kv_blocks_free")
    assert free + float_stack.metric("kv_blocks_cached") == total
