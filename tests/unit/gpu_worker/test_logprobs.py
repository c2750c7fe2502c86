"""Log-probabilities of the tokens that were chosen, for rows that ask for them."""

import random

import msgspec
import numpy as np
import pytest
import torch

from shared.sampling import SamplingParams
from tests.fakes.tiny_llama import VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=12, seed=3, temperature=0.0, ignore_eos=True, with_logprobs=True)


def prompt_of(size: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{seed}/{size}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def expected(tiny, request) -> list[float]:
    """By one forward pass of Transformers over the whole text."""
    with torch.inference_mode():
        logprobs = tiny.peer(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
    start = len(request.prompt) - 1
    return [float(logprobs[start + place, token]) for place, token in enumerate(request.output)]


CHANGES: dict[str, dict] = {
    "greedy": {},
    "drawn": {"temperature": 1.3},
    "filtered": {"temperature": 0.8, "top_p": 0.7, "top_k": 5},
    "penalised": {"repetition_penalty": 1.8, "presence_penalty": 1.0},
    "biased": {"logit_bias": ((77, 50.0),)},
    "masked": {"min_tokens": 12, "ignore_eos": False},
}


@pytest.mark.parametrize("change", CHANGES)
def test_are_those_of_the_unchanged_distribution(change: str, tiny, make_driver) -> None:
    driver = make_driver()
    params = msgspec.structs.replace(GREEDY, **CHANGES[change])
    request = driver.add("a", prompt_of(21), params)
    driver.run()
    assert len(request.logprobs) == len(request.output) == 12
    np.testing.assert_allclose(request.logprobs, expected(tiny, request), rtol=1e-4, atol=1e-5)


def test_only_rows_that_ask_get_them_and_the_others_sample_as_ever(tiny, make_driver) -> None:
    driver = make_driver()
    silent = msgspec.structs.replace(GREEDY, with_logprobs=False, temperature=1.0)
    requests = [
        driver.add(f"{n}", prompt_of(9 + n), silent if n % 2 else msgspec.structs.replace(silent, with_logprobs=True))
        for n in range(6)
    ]
    driver.run()
    alone = make_driver()
    for request in requests:
        alone.add(request.request_id, request.prompt, silent)
    outputs = alone.run()
    for number, request in enumerate(requests):
        assert request.output == outputs[request.request_id]
        assert len(request.logprobs) == (0 if number % 2 else 12)
    assert all(result.logprobs == () for result in alone.results)


def test_a_row_that_ends_with_an_error_has_none(tiny, make_driver) -> None:
    driver = make_driver()
    driver.add("a", prompt_of(9), GREEDY)
    driver.add("b", prompt_of(10), GREEDY)
    driver.step()
    driver.engine.cache.data[driver.requests["a"].blocks] = float("nan")
    result = driver.step()
    assert [row for row, _ in result.logprobs] == [1] and [row for row, _ in result.ended] == [0]
