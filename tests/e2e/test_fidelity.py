"""Greedy float32 output over the whole stack equals Transformers' `generate`, token for token.

The references are computed in this run, one prompt at a time, on the same weights. Prompt lengths sit on and around
block and chunk boundaries. Every variant asserts that the mechanism it is about really happened.

BEST-28: 24 prompts, each the same alone, all at once, with chunks of 512 and of 64, with a cold and a warm cache, on
two workers and after preemptions; and BEST-23: prompts of k blocks, one token more and one less, sent twice.
"""

import pytest

from tests.harness.fixtures import StartStack
from tests.harness.reference_text import LENGTHS, OUTPUT_TOKENS, generate_all

pytestmark = [pytest.mark.model, pytest.mark.slow]

WHOLE_BUDGET = {"itl_target_s": 0.0}
"""Chunks as large as the budget of tokens allows, however slow this machine is beside decode rows."""


def assert_equal(got: list[list[int]], want: list[list[int]]) -> None:
    same = {n: [a == b for a, b in zip(g, w, strict=True)] for n, g, w in zip(LENGTHS, got, want, strict=True)}
    first_difference = {n: equal.index(False) for n, equal in same.items() if not all(equal)}
    assert not first_difference, f"first different output token by prompt length: {first_difference}"


@pytest.mark.timeout(600)
def test_all_at_once_equals_each_alone_cold_and_warm(
    start_stack: StartStack, text_prompts: list[list[int]], text_references: list[list[int]]
) -> None:
    """The second time, prompts on and around block boundaries are prefix hits: what is not computed changes nothing."""
    with start_stack(dtype="float32", **WHOLE_BUDGET) as stack:
        output, watch = generate_all(stack, text_prompts)
        assert_equal(output, text_references)
        assert 64 < max(watch.chunk_sizes()) <= 512
        assert stack.metric("num_preemptions_total") == 0
        before = stack.metric("prefix_cache_hits_total")
        output, _ = generate_all(stack, text_prompts)
        assert_equal(output, text_references)
        expected = sum((length - 1) // 16 * 16 for length in LENGTHS)
        assert stack.metric("prefix_cache_hits_total") >= before + expected


@pytest.mark.timeout(600)
def test_chunks_of_64(start_stack: StartStack, text_prompts: list[list[int]], text_references: list[list[int]]) -> None:
    with start_stack(dtype="float32", max_num_batched_tokens=64, max_num_seqs=24, **WHOLE_BUDGET) as stack:
        output, watch = generate_all(stack, text_prompts)
        assert_equal(output, text_references)
        # 900 tokens take at least 15 steps in chunks of 64.
        chunks = watch.chunk_sizes()
        assert max(chunks) <= 64 and len(chunks) > len(text_prompts) + 14


@pytest.mark.timeout(600)
def test_two_workers(start_stack: StartStack, text_prompts: list[list[int]], text_references: list[list[int]]) -> None:
    with start_stack(dtype="float32", workers=2) as stack:
        output, watch = generate_all(stack, text_prompts)
        assert_equal(output, text_references)
        steps = watch.steps_by_worker()
        assert len(steps) == 2 and min(steps.values()) >= OUTPUT_TOKENS


@pytest.mark.timeout(600)
def test_a_pool_so_small_that_requests_are_preempted(
    start_stack: StartStack, text_prompts: list[list[int]], text_references: list[list[int]]
) -> None:
    # The longest request needs 60 blocks; all together need more than 260. Their order decides how many are preempted:
    # in this one it is 11, by a simulation that also varied when they arrive.
    with start_stack(dtype="float32", num_blocks=72) as stack:
        output, _ = generate_all(stack, text_prompts, longest_first_every_s=0.05)
        assert_equal(output, text_references)
        assert stack.metric("num_preemptions_total") >= 3
