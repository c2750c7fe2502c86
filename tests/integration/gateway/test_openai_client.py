"""BEST-13: the official client, and its own types read strictly, over every form of usage reporting."""

import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import PromptTokensDetails

from shared.messages import Hypothesis
from shared.packing import pack_int32
from tests.fakes.byte_model import MAX_MODEL_LEN, answer, spell
from tests.fakes.scripted_pool import Script
from tests.integration.gateway.conftest import Scene

CHAT: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def client(scene: Scene) -> Any:
    with scene.gateway.openai() as client:
        yield client


def test_client_streams_a_chat(scene: Scene, client: openai.OpenAI) -> None:
    scene.scripts["hello"] = answer("Grüße 👋🏽 aus Redis")
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Grüße 👋🏽 aus Redis"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert [c.choices[0].finish_reason for c in chunks].count(None) == len(chunks) - 1
    assert len({c.id for c in chunks}) == len({c.created for c in chunks}) == 1


def test_client_completes_without_streaming(scene: Scene, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    assert whole.choices[0].message.content is not None and whole.choices[0].message.content.startswith("OK: ")
    text = client.completions.create(model="bytes", prompt="abc")
    assert text.choices[0].text == "OK: abc"
    assert text.usage == CompletionUsage(
        prompt_tokens=3,
        completion_tokens=8,
        total_tokens=11,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
    )


def test_usage_tells_what_of_the_prompt_was_cached(scene: Scene, client: openai.OpenAI) -> None:
    scene.scripts["warm"] = Script(spell("text"), num_cached=3)
    text = client.completions.create(model="bytes", prompt="warm")
    assert text.usage is not None and text.usage.prompt_tokens_details == PromptTokensDetails(cached_tokens=3)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = scene.stream("/v1/completions", model="bytes", prompt=["warm", "cold"], stream_options=options)
    assert stream.chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all("prompt_tokens_details" in chunk["usage"] for chunk in stream.chunks)


def test_client_lists_models(scene: Scene, client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [m.id for m in listed] == ["bytes", "alias"]
    assert client.models.retrieve("alias").to_dict()["max_model_len"] == MAX_MODEL_LEN
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("continuous", [False, True])
def test_usage_is_reported_as_asked(scene: Scene, options: dict[str, bool] | None, continuous: bool) -> None:
    scene.scripts["hello"] = answer("0123456789")
    if continuous:
        options = {**(options or {}), "continuous_usage_stats": True}
    asked = bool(options and options.get("include_usage"))
    stream = scene.stream("/v1/chat/completions", **CHAT, stream_options=options)
    chunks = stream.chunks
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    bare = [i for i, c in enumerate(chunks) if c["choices"] == []]
    assert bare == ([len(chunks) - 1] if asked else [])
    if asked:
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == 11 and usage["total_tokens"] == usage["prompt_tokens"] + 11
    with_choices = [c for c in chunks if c["choices"]]
    if not continuous:
        assert all(c.get("usage") is None for c in with_choices)
        return
    counts = [c["usage"]["completion_tokens"] for c in with_choices]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 11
    assert len({c["usage"]["prompt_tokens"] for c in chunks}) == 1


def test_event_ids_hold_the_committed_count(scene: Scene) -> None:
    stream = scene.stream("/v1/completions", model="bytes", prompt="abc")
    ids = [int((e.event_id or "-1").rstrip("eu")) for e in stream.events if e.data != "[DONE]"]
    assert ids == sorted(ids) and ids[-1] == 8
    assert stream.text() == "OK: abc"


def test_several_prompts_are_choices_of_one_stream(scene: Scene) -> None:
    scene.scripts["one"] = answer("first")
    scene.scripts["two"] = Script(spell("second!"), end=None, hold_after=None)
    body = {"model": "bytes", "prompt": ["one", "two", "three"], "max_tokens": 7}
    stream = scene.stream("/v1/completions", **body, stream_options={"include_usage": True})
    assert [stream.text(i) for i in range(3)] == ["first", "second!", "OK: thr"]
    assert [stream.finish_reasons(i) for i in range(3)] == [["stop"], ["length"], ["length"]]
    assert stream.events[-2].event_id == "6e,7e,7eu"
    assert stream.chunks[-1]["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 20,
        "total_tokens": 31,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = scene.post("/v1/completions", **body).json()
    assert [c["text"] for c in whole["choices"]] == ["first", "second!", "OK: thr"]
    assert [c["finish_reason"] for c in whole["choices"]] == ["stop", "length", "length"]
    assert whole["usage"] == stream.chunks[-1]["usage"]


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_all_forms_of_a_prompt(scene: Scene, prompt: Any) -> None:
    answered = scene.post("/v1/completions", model="bytes", prompt=prompt)
    assert Completion.model_validate_json(answered.content, strict=True).choices[0].text == "OK: abc"


def test_whole_chat_is_strictly_typed_and_carries_its_id(scene: Scene) -> None:
    answered = scene.post("/v1/chat/completions", **CHAT)
    whole = ChatCompletion.model_validate_json(answered.content, strict=True)
    assert whole.id.startswith("chatcmpl-") and answered.headers["x-request-id"] == whole.id
    assert whole.id in scene.pool.submissions


def test_a_waiting_stream_sends_comments(scene_with_fast_pings: Scene) -> None:
    scene = scene_with_fast_pings
    scene.scripts["slow"] = answer("ab", hold_after=1)
    url, lines = "/v1/completions", []
    body = {"model": "bytes", "prompt": "slow", "stream": True}
    with scene.gateway.http.stream("POST", url, json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": ping") == 3:
                scene.pool.release()
    assert lines.count(": ping") >= 3 and lines[-2] == "data: [DONE]"


def test_comments_between_events_do_not_disturb_the_official_client(scene_with_fast_pings: Scene) -> None:
    """A blank line behind a comment ended an event without data for clients that remember the last event id."""
    scene = scene_with_fast_pings
    scene.scripts["slow"] = answer("ab", hold_after=1)
    threading.Timer(0.5, scene.pool.release).start()
    with scene.gateway.openai() as client:
        chunks = list(client.completions.create(model="bytes", prompt="slow", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"
    assert chunks[-1].choices[0].finish_reason is not None


@pytest.fixture
def scene_with_fast_pings(open_scene: Any) -> Scene:
    return open_scene(ping_interval_s=0.1)


def test_traces_continue_the_callers(scene: Scene) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    response: httpx.Response = scene.gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    submission = scene.pool.submissions[response.json()["id"]]
    assert submission.traceparent.split("-")[1] == trace and "b7ad6b7169203331" not in submission.traceparent


def test_client_streams_several_choices(scene: Scene, client: openai.OpenAI) -> None:
    scene.scripts["hello"] = [answer("first"), answer("the second"), answer("3")]
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**CHAT, n=3, stream=True, stream_options=options))
    texts = ["", "", ""]
    reasons: list[list[str]] = [[], [], []]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["first", "the second", "3"] and reasons == [["stop"]] * 3
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6 + 11 + 2
    whole = client.chat.completions.create(**CHAT, n=3)
    assert [c.message.content for c in whole.choices] == texts and whole.usage == chunks[-1].usage


def test_client_asks_for_the_best_of_several(scene: Scene, client: openai.OpenAI) -> None:
    scene.scripts["abc"] = [answer("bad", logprobs=[-5.0] * 4), answer("good", logprobs=[-0.1] * 5)]
    assert client.completions.create(model="bytes", prompt="abc", best_of=2).choices[0].text == "good"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bytes", prompt="abc", best_of=2, stream=True)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="bytes", prompt="abc", best_of=2, n=3)
    assert caught.value.param == "best_of"


def test_client_searches_with_beams(scene: Scene, client: openai.OpenAI) -> None:
    found = tuple(Hypothesis(pack_int32(spell(text)), -1.0) for text in ("one", "two"))
    scene.scripts["hello"] = Script((), end=None, hypotheses=found)
    extra = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.8}
    whole = client.chat.completions.create(**CHAT, n=2, temperature=0, extra_body=extra)
    assert [c.message.content for c in whole.choices] == ["one", "two"]
    chunks = list(client.chat.completions.create(**CHAT, n=2, stream=True, extra_body=extra))
    texts = [[c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == k] for k in range(2)]
    assert ["".join(parts) for parts in texts] == ["one", "two"]
