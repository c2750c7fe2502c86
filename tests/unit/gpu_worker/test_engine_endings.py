"""Token-level endings, the columns of a result, and requests that harm nobody but themselves."""

import math
import random

import msgspec
import pytest

from shared.messages import EndReason
from shared.packing import NO_TOKEN, unpack_int32
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import owns_blocks
from tests.fakes.tiny_llama import EOS, VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0, ignore_eos=True)


def prompt_of(size: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{seed}/{size}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def with_params(**changes) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **changes)


PROMPT = prompt_of(23)


@pytest.fixture
def plain(tiny) -> list[int]:
    """What PROMPT leads to when nothing ends it."""
    output = tiny.expected(PROMPT, 12)
    assert EOS not in output
    return output


def test_length(make_driver, plain) -> None:
    driver = make_driver()
    request = driver.add("a", PROMPT, GREEDY)
    driver.run()
    assert (request.output, request.end) == (plain, EndReason.LENGTH)


def test_stop_token_is_the_last_token(make_driver, plain) -> None:
    driver = make_driver()
    at = next(i for i in range(2, 12) if plain[i] not in plain[:i])
    request = driver.add("a", PROMPT, with_params(stop_token_ids=(plain[at], 299)))
    driver.run()
    assert (request.output, request.end) == (plain[: at + 1], EndReason.STOP_TOKEN)


def test_stop_token_wins_over_length(make_driver, plain) -> None:
    driver = make_driver()
    request = driver.add("a", PROMPT, with_params(stop_token_ids=(plain[0],), max_tokens=1))
    driver.run()
    assert (request.output, request.end) == (plain[:1], EndReason.STOP_TOKEN)


def test_eos_ends_the_row_and_wins_over_a_stop_token(make_driver) -> None:
    driver = make_driver()
    request = driver.add(
        "a", PROMPT, with_params(ignore_eos=False, stop_token_ids=(EOS,), logit_bias=((EOS, 1000.0),), max_tokens=1)
    )
    driver.run()
    assert (request.output, request.end) == ([EOS], EndReason.EOS)


def test_ignore_eos_makes_it_an_ordinary_token(make_driver) -> None:
    driver = make_driver()
    request = driver.add("a", PROMPT, with_params(logit_bias=((EOS, 1000.0),), max_tokens=4, min_tokens=2))
    driver.run()
    assert (request.output, request.end) == ([EOS] * 4, EndReason.LENGTH)


def test_min_tokens_masks_eos_and_stop_tokens(make_driver, plain) -> None:
    driver = make_driver()
    stops = tuple(sorted({plain[0], plain[1]}))
    forced = with_params(ignore_eos=False, logit_bias=((EOS, 1000.0),), min_tokens=5, stop_token_ids=stops)
    request = driver.add("a", PROMPT, forced)
    driver.run()
    assert request.output[5:] == [EOS]
    assert not {EOS, *stops} & set(request.output[:5])
    assert request.end is EndReason.EOS


def test_min_tokens_counts_tokens_from_before_a_preemption(make_driver) -> None:
    driver = make_driver()
    params = with_params(ignore_eos=False, logit_bias=((EOS, 1000.0),), min_tokens=6)
    request = driver.add("a", PROMPT, params)
    for _ in range(4):
        driver.step()
    driver.step(drop=["a"])
    driver.add("a", PROMPT, params)
    driver.run()
    assert len(request.output) == 7
    assert request.output[-1] == EOS


def test_plans_made_before_an_ending_was_known_yield_nothing(make_driver, plain) -> None:
    """The row ends at its third token; later plans still count it and even bring it a block."""
    driver = make_driver()
    params = with_params(stop_token_ids=(plain[2],), max_tokens=50)
    assert plain[2] not in plain[:2]
    driver.add("a", PROMPT, params, row=1)
    neighbour = driver.add("b", prompt_of(9), with_params(max_tokens=20), row=0)
    driver.step()
    driver.step()
    result = driver.step()
    assert result.ended == ((1, EndReason.STOP_TOKEN),)
    before = len(neighbour.output)
    driver.extra_blocks = [(1, 0)]
    late = driver.step()
    assert not owns_blocks(driver.engine, 1)
    assert list(unpack_int32(late.tokens)) == neighbour.output[-1:]
    assert len(neighbour.output) == before + 1
    assert driver.step(drop_rows=[1]).left == ()


def test_rows_of_a_result(make_driver) -> None:
    driver = make_driver()
    driver.add("a", prompt_of(30), GREEDY, row=3)
    first = driver.step({"a": 10})
    assert (first.step_id, first.tokens, first.joined, first.ended) == (1, b"", (), ())
    driver.add("b", prompt_of(4), with_params(max_tokens=1), row=1)
    second = driver.step({"a": 20, "b": 4})
    tokens = list(unpack_int32(second.tokens))
    assert [token == NO_TOKEN for token in tokens] == [True, False, True, False]
    assert sorted(second.joined) == [(1, "b", 0), (3, "a", 0)]
    assert second.ended == ((1, EndReason.LENGTH),)
    third = driver.step()
    assert (third.joined, third.worker, third.incarnation) == ((), "worker-0", 1)


def test_a_row_dropped_before_its_first_token_was_never_known_to_readers(make_driver) -> None:
    driver = make_driver()
    driver.add("a", prompt_of(30), GREEDY)
    driver.step({"a": 10})
    assert driver.step(drop=["a"]).left == ()


def test_roster_every_64_steps(make_driver) -> None:
    driver = make_driver()
    driver.add("a", prompt_of(4), with_params(max_tokens=70), row=2)
    driver.add("b", prompt_of(200), GREEDY, row=0)
    for _ in range(64):
        driver.step({"a": 4} if not driver.results else {})
    rosters = [(result.step_id, result.roster) for result in driver.results if result.roster]
    assert rosters == [(64, ((2, "a", 64),))]
    assert sum(driver.results[63].rates[1:3]) > 0


def test_begin_forgets_every_row_and_expects_plan_one(make_driver, plain) -> None:
    driver = make_driver()
    driver.add("old", prompt_of(33), GREEDY)
    driver.step()
    again = type(driver)(driver.engine, worker="worker-9", incarnation=4)
    request = again.add("a", PROMPT, GREEDY)
    again.run()
    assert request.output == plain
    assert {(r.worker, r.incarnation) for r in again.results} == {("worker-9", 4)}


UNUSABLE = {
    "token beyond the vocabulary": ([5, VOCAB_SIZE], GREEDY),
    "negative token": ([-1, 5], GREEDY),
    "bias beyond the vocabulary": (PROMPT, with_params(logit_bias=((VOCAB_SIZE, 1.0),))),
    "bias that is not a number": (PROMPT, with_params(logit_bias=((5, math.nan),))),
    "infinite temperature": (PROMPT, with_params(temperature=math.inf)),
    "top_p that is not a number": (PROMPT, with_params(top_p=math.nan)),
    "repetition penalty of zero": (PROMPT, with_params(repetition_penalty=0.0)),
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_an_unusable_request_ends_alone(fault: str, make_driver, plain) -> None:
    driver = make_driver()
    good = driver.add("good", PROMPT, GREEDY)
    driver.step()
    prompt, params = UNUSABLE[fault]
    bad = driver.add("bad", prompt, params)
    driver.run()
    assert (bad.output, bad.end) == ([], EndReason.ERROR)
    assert (good.output, good.end) == (plain, EndReason.LENGTH)


def test_what_is_sound_in_an_unusable_prompt_is_computed_right(make_driver, plain) -> None:
    """Until it ends, the scheduler may give its full blocks to a request that begins alike."""
    driver = make_driver(block_size=8)
    bad = driver.add("bad", [*PROMPT, VOCAB_SIZE, 5], GREEDY)
    driver.step(chunk_size=len(PROMPT))
    good = driver.add("good", PROMPT, GREEDY, hits=bad.blocks[: (len(PROMPT) - 1) // 8])
    assert good.blocks
    driver.run()
    assert (bad.end, good.output) == (EndReason.ERROR, plain)


def test_logits_that_are_not_finite_end_one_row_alone(make_driver, plain, tiny) -> None:
    """The row's own keys are poisoned; its neighbour, and the row that gets its blocks next, never notice."""
    driver = make_driver(num_blocks=11, max_num_seqs=2)
    good = driver.add("good", PROMPT, GREEDY)
    bad = driver.add("bad", prompt_of(30), with_params(max_tokens=40))
    driver.step()
    driver.step()
    driver.engine.cache.data[bad.blocks[0]] = float("nan")
    driver.step()
    assert bad.end is EndReason.ERROR
    assert len(bad.output) == 2
    heir = driver.add("heir", prompt_of(35), GREEDY)
    driver.run()
    assert good.output == plain
    assert heir.output == tiny.expected(prompt_of(35), 12)
