"""`n` and `best_of` over the whole stack, in float32: draws by (seed, choice, index), scores from the records."""

import json
from typing import Any

import httpx
import pytest

from services.gateway.text.tokenizer import TextTokenizer
from shared.records import RequestRecord, choice_id, read_record
from shared.redis_client import connect
from tests.harness.stack import Stack

pytestmark = [pytest.mark.model]
PROMPT = "The old lighthouse keeper opened the door and"


def complete(stack: Stack, **fields: Any) -> dict[str, Any]:
    body = {"model": stack.model, "prompt": PROMPT, "max_tokens": 24, **fields}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def texts_of(whole: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
    return [choice["text"] for choice in whole["choices"]]


def record_of(stack: Stack, request_id: str) -> RequestRecord:
    redis = connect(stack.redis_url)
    record = read_record(redis, stack.keys, request_id)
    redis.close()
    assert record is not None
    return record


@pytest.mark.timeout(300)
def test_choice_k_is_the_same_text_in_every_run(float_stack: Stack) -> None:
    """BEST-18 over choices: other choices, and other requests beside them, change nothing."""
    four = texts_of(complete(float_stack, n=4, seed=11, temperature=1))
    assert len(set(four)) == 4
    assert texts_of(complete(float_stack, n=2, seed=11, temperature=1)) == four[:2]
    assert texts_of(complete(float_stack, seed=11, temperature=1)) == four[:1]
    several = texts_of(complete(float_stack, prompt=["x", PROMPT], n=4, seed=11, temperature=1))
    assert several[4:] == four
    assert texts_of(complete(float_stack, n=2, seed=12, temperature=1)) != four[:2]


@pytest.mark.timeout(300)
def test_a_stream_of_four_tells_what_the_whole_answer_tells(float_stack: Stack) -> None:
    fields = {"n": 4, "seed": 3, "temperature": 1, "stop": " the"}
    whole = complete(float_stack, **fields)
    body = {"model": float_stack.model, "prompt": PROMPT, "max_tokens": 24, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    texts, usage = [""] * 4, None
    reasons: list[list[str]] = [[], [], [], []]
    with httpx.stream("POST", f"{float_stack.url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk["usage"] or usage
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
                    reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == texts_of(whole)
    assert reasons == [[choice["finish_reason"]] for choice in whole["choices"]]
    assert usage is not None
    cached = {"prompt_tokens_details": None}  # the second time the prompt is cached
    assert {**usage, **cached} == {**whole["usage"], **cached}


@pytest.mark.timeout(300)
def test_the_best_of_six_are_those_with_the_highest_logprob_per_token(float_stack: Stack, model_folder: Any) -> None:
    tokenizer = TextTokenizer.from_folder(model_folder)
    whole = complete(float_stack, n=2, best_of=6, seed=5, temperature=1)
    records = [record_of(float_stack, choice_id(whole["id"], k)) for k in range(6)]
    scores = []
    for record in records:
        assert len(record.logprobs) == len(record.output) > 0 and all(value <= 0 for value in record.logprobs)
        assert record.final is not None
        assert record.final.cumulative_logprob == pytest.approx(sum(record.logprobs), abs=1e-3)
        scores.append(sum(record.logprobs) / len(record.logprobs))
    best = sorted(range(6), key=lambda k: -scores[k])[:2]
    assert len(set(scores)) == 6
    assert texts_of(whole) == [tokenizer.decode(list(records[k].output)) for k in best]
    assert whole["usage"]["completion_tokens"] == sum(len(record.output) for record in records)
    assert whole["usage"]["prompt_tokens"] == len(records[0].submission.prompt_tokens) // 4
    (greedy,) = texts_of(complete(float_stack, temperature=0, best_of=2))
    assert greedy == texts_of(complete(float_stack, temperature=0))[0]
    float_stack.wait_idle()
