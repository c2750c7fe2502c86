"""Whatever the scheduler does with a request's KV, its text is the one that it would have alone (float32, greedy).

The references are Transformers', one prompt at a time. Each test asserts on the plans that the mechanism it is about
really happened. Chunks, two workers and warm prefixes are in test_fidelity.py, beams in test_beam_search.py.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.tokenizer import TextTokenizer
from shared.messages import CopyKind
from shared.records import choice_id
from tests.harness.fixtures import StartStack
from tests.harness.reference_text import complete_all, generate_all, records_of
from tests.harness.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 24
SIXTEEN = slice(3, 19)
"""Of the prompts: 5 to 129 tokens, with 16, 32, 64 and 128 ± 1."""
EIGHT = slice(5, 13)
"""15 to 63 tokens."""
NUM_BLOCKS = 12
"""The longest of the sixteen needs 10. When they arrive longest first, the core preempts 6 to 10 of them, and 5 or 6 of
the eight with 48 output tokens (counted with the worker of the property tests); in other orders it may be none."""
LONGEST_FIRST_S = 0.02
"""Between two arrivals, so that the order does not depend on which connection was accepted first."""


@dataclass(frozen=True)
class SmallPool:
    """A stack that must preempt, and how."""

    mode: str
    stack: Stack


@pytest.fixture(scope="module", params=["swap", "recompute"])
def small_pool(request: pytest.FixtureRequest, start_stack: StartStack) -> Iterator[SmallPool]:
    host = {"num_cpu_blocks": 160} if request.param == "swap" else {}
    with start_stack(dtype="float32", num_blocks=NUM_BLOCKS, preemption=request.param, **host) as stack:
        yield SmallPool(request.param, stack)


def first(outputs: list[list[int]], count: int = NUM_TOKENS) -> list[list[int]]:
    return [output[:count] for output in outputs]


def test_sixteen_requests_in_a_pool_for_two(
    small_pool: SmallPool, text_prompts: list[list[int]], text_references: list[list[int]]
) -> None:
    """Twice: the second time most prompts were evicted from the cache; with a host pool they come back from there.

    BEST-25: they need seven times the blocks that there are. Tokens never pause for 5 s, nobody is preempted again and
    again, and it is no storm in the logs.
    """
    stack, prompts, expected = small_pool.stack, text_prompts[SIXTEEN], first(text_references[SIXTEEN])
    began, num_lines = time.monotonic(), stack.num_log_lines()
    output, watch = generate_all(stack, prompts, LONGEST_FIRST_S, NUM_TOKENS)
    assert output == expected
    assert stack.metric("num_preemptions_total") >= 3
    assert sum(watch.preemptions().values()) >= 3 and max(watch.preemptions().values()) <= 3
    assert watch.longest_pause() < 5
    assert stack.num_log_lines() - num_lines < 10 * (time.monotonic() - began)
    if small_pool.mode == "recompute":
        assert not watch.copied_blocks()
        return
    assert len(watch.swapped_in()) >= 3
    output, watch = generate_all(stack, prompts, num_tokens=NUM_TOKENS)
    assert output == expected
    assert watch.copied_blocks()[CopyKind.IN] > 0 and watch.copied_blocks()[CopyKind.OUT] > 0
    hits = [new for new in watch.added_rows() if 0 < new.num_computed_tokens < new.num_prompt_tokens]
    assert sum(new.num_computed_tokens for new in hits) > NUM_BLOCKS * 16, "more was hit than the KV cache holds"


def test_requests_that_preempt_each_other_end_as_they_should(
    small_pool: SmallPool,
    text_prompts: list[list[int]],
    text_references: list[list[int]],
    model_folder: Path,
) -> None:
    """BEST-24: no token twice, none lost; max_tokens, min_tokens, a stop string and log-probabilities count right."""
    stack, tokenizer = small_pool.stack, TextTokenizer.from_folder(model_folder)
    prompts, references = text_prompts[EIGHT], text_references[EIGHT]
    texts = [tokenizer.decode(output) for output in references]
    stop = texts[1][len(texts[1]) * 3 // 4 :][:6]
    before = texts[1].index(stop)
    exact = {"max_tokens": 48, "min_tokens": 48, "temperature": 0}
    bodies: list[dict[str, Any]] = [{**exact, "prompt": prompt} for prompt in prompts]
    bodies[1] |= {"stop": stop, "min_tokens": 0}
    bodies[2] |= {"max_tokens": 40, "min_tokens": 40}
    bodies[3] |= {"best_of": 2}
    preempted = stack.metric("num_preemptions_total")
    with stack.watch_log() as watch:
        answers = asyncio.run(complete_all(stack, bodies, LONGEST_FIRST_S))
        stack.wait_idle()
    assert stack.metric("num_preemptions_total") - preempted >= 3
    assert bool(watch.swapped_in()) == (small_pool.mode == "swap")
    choices = [answer["choices"][0] for answer in answers]
    expected = [texts[0], texts[1][:before], tokenizer.decode(references[2][:40]), *texts[3:]]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", *["length"] * 6]
    used = [answer["usage"]["completion_tokens"] for answer in answers]
    assert [used[0], *used[2:]] == [48, 40, 2 * 48, *[48] * 4]
    assert texts[1][: before + len(stop)] == tokenizer.decode(references[1][: used[1]])[: before + len(stop)]
    for record in records_of(stack, [choice_id(answers[3]["id"], k) for k in range(2)]):
        assert len(record.logprobs) == len(record.output) == 48


def test_four_choices_of_four_prompts_share_what_they_can(
    float_stack: Stack, text_prompts: list[list[int]], text_references: list[list[int]]
) -> None:
    """`n = 4`, greedy: sixteen times the text that one alone has, from prompts that were computed once."""
    prompts, references = text_prompts[5:12:2], text_references[5:12:2]  # 15, 17, 32 and 48 tokens
    exact = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "temperature": 0, "n": 4}
    with float_stack.watch_log() as watch:
        answers = asyncio.run(complete_all(float_stack, [{**exact, "prompt": prompt} for prompt in prompts]))
        float_stack.wait_idle()
    for answer, reference in zip(answers, first(references), strict=True):
        records = records_of(float_stack, [choice_id(answer["id"], k) for k in range(4)])
        assert [list(record.output) for record in records] == [reference] * 4
    forks = [new for new in watch.added_rows() if new.num_computed_tokens == new.num_prompt_tokens - 1]
    assert len(forks) == 12, "three of four choices enter with all of the prompt but its last token"
    assert watch.copied_blocks()[CopyKind.WITHIN] >= 9, "all but those whose last token begins a block"


def test_choices_are_swapped_on_two_workers(
    start_stack: StartStack, text_prompts: list[list[int]], text_references: list[list[int]]
) -> None:
    """Swap, forks and placement together: each of two workers has blocks for two of the longest."""
    prompts, references = text_prompts[SIXTEEN], first(text_references[SIXTEEN])
    exact = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "temperature": 0}
    counts = [4 if place % 4 == 2 else 1 for place in range(16)]
    bodies = [{**exact, "prompt": prompt, "n": n} for prompt, n in zip(prompts, counts, strict=True)]
    options = {"num_blocks": NUM_BLOCKS, "num_cpu_blocks": 160, "preemption": "swap"}
    with start_stack(dtype="float32", workers=2, **options) as stack, stack.watch_log() as watch:
        answers = asyncio.run(complete_all(stack, bodies, LONGEST_FIRST_S))
        stack.wait_idle()
        for answer, n, reference in zip(answers, counts, references, strict=True):
            records = records_of(stack, [choice_id(answer["id"], k) for k in range(n)])
            assert [list(record.output) for record in records] == [reference] * n
        forks = stack.metric("num_forks_total")
    assert {worker for worker, _ in watch.swapped_in()} == {"worker-0", "worker-1"}
    assert forks >= 4 and watch.copied_blocks()[CopyKind.WITHIN] > 0
