"""Greedy float32 output over the whole stack equals Transformers' `generate`, token for token.

The references are computed in this run, one prompt at a time, on the same weights. Prompt lengths sit on and around
block and chunk boundaries. Every variant asserts that the mechanism it is about really happened.
"""

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from shared.records import read_record
from shared.redis_client import connect
from tests.harness.fixtures import StartStack
from tests.harness.stack import LogWatch, Stack

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 300, 450, 700, 900)
OUTPUT_TOKENS = 48
WORDS = "the history of science shows that people learn how water moves under mountains and long rivers"

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    """Prompts of ordinary words, cut to exact token lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    rng = random.Random(0)
    words = WORDS.split()
    text = " ".join(rng.choice(words) for _ in range(4000))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = [rng.randrange(len(ids) - length) for length in LENGTHS]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def references(model_folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What Transformers generates for each prompt alone."""
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
    stack: Stack, prompts: list[list[int]], longest_first_every_s: float = 0.0
) -> tuple[list[list[int]], LogWatch]:
    """Send all prompts at once; the committed token ids of each, read from its record, and what crossed the log.

    `longest_first_every_s`: one after the other instead, the last of `prompts` first.
    """

    async def one(client: httpx.AsyncClient, prompt: list[int], place: int) -> str:
        await asyncio.sleep(longest_first_every_s * (len(prompts) - 1 - place))
        # `min_tokens` masks EOS exactly as Transformers' `min_new_tokens` does.
        body = {"model": stack.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "min_tokens": OUTPUT_TOKENS}
        answer = await client.post("/v1/completions", json={**body, "temperature": 0})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
        return str(answer.json()["id"])

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=280) as client:
            return await asyncio.gather(*(one(client, prompt, place) for place, prompt in enumerate(prompts)))

    with stack.watch_log() as watch:
        request_ids = asyncio.run(run())
        stack.wait_idle()
    redis = connect(stack.redis_url)
    records = [read_record(redis, stack.keys, request_id) for request_id in request_ids]
    redis.close()
    assert all(record is not None for record in records)
    return [list(record.output) for record in records if record is not None], watch


def assert_equal(got: list[list[int]], want: list[list[int]]) -> None:
    same = {n: [a == b for a, b in zip(g, w, strict=True)] for n, g, w in zip(LENGTHS, got, want, strict=True)}
    first_difference = {n: equal.index(False) for n, equal in same.items() if not all(equal)}
    assert not first_difference, f"first different output token by prompt length: {first_difference}"


@pytest.mark.timeout(600)
def test_all_at_once_equals_each_alone_cold_and_warm(
    start_stack: StartStack, prompts: list[list[int]], references: list[list[int]]
) -> None:
    """The second time, prompts on and around block boundaries are prefix hits: what is not computed changes nothing."""
    with start_stack(dtype="float32") as stack:
        output, _ = generate_all(stack, prompts)
        assert_equal(output, references)
        assert stack.metric("num_preemptions_total") == 0
        before = stack.metric("prefix_cache_hits_total")
        output, _ = generate_all(stack, prompts)
        assert_equal(output, references)
        expected = sum((length - 1) // 16 * 16 for length in LENGTHS)
        assert stack.metric("prefix_cache_hits_total") >= before + expected


@pytest.mark.timeout(600)
def test_chunks_of_64(start_stack: StartStack, prompts: list[list[int]], references: list[list[int]]) -> None:
    with start_stack(dtype="float32", max_num_batched_tokens=64, max_num_seqs=24) as stack:
        output, watch = generate_all(stack, prompts)
        assert_equal(output, references)
        # 900 tokens take at least 15 steps in chunks of 64.
        chunks = watch.chunk_sizes()
        assert max(chunks) <= 64 and len(chunks) > len(prompts) + 14


@pytest.mark.timeout(600)
def test_two_workers(start_stack: StartStack, prompts: list[list[int]], references: list[list[int]]) -> None:
    with start_stack(dtype="float32", workers=2) as stack:
        output, watch = generate_all(stack, prompts)
        assert_equal(output, references)
        steps = watch.steps_by_worker()
        assert len(steps) == 2 and min(steps.values()) >= OUTPUT_TOKENS


@pytest.mark.timeout(600)
def test_a_pool_so_small_that_requests_are_preempted(
    start_stack: StartStack, prompts: list[list[int]], references: list[list[int]]
) -> None:
    # The longest request needs 60 blocks; all together need more than 260. Their order decides how many are preempted:
    # in this one it is 11, by a simulation that also varied when they arrive.
    with start_stack(dtype="float32", num_blocks=72) as stack:
        output, _ = generate_all(stack, prompts, longest_first_every_s=0.05)
        assert_equal(output, references)
        assert stack.metric("num_preemptions_total") >= 3
