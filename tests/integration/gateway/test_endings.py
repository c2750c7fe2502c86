"""BEST-12 and BEST-14 over HTTP: exactly one terminal chunk per choice, with the whole answer's reason."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.messages import EndReason, FinishReason, Stop
from tests.fakes.byte_model import EOS, answer, spell
from tests.fakes.scripted_pool import Script
from tests.integration.gateway.conftest import Scene


@dataclass
class Ending:
    name: str
    script: Script
    text: str
    reason: str
    body: dict[str, Any] = field(default_factory=dict)
    stop_reason: Any = None
    num_tokens: int | None = None


FOREVER = Script(spell("ABC DEFGHIJ and much more of it"), end=None)

ENDINGS = [
    Ending("eos", answer("done"), "done", "stop", num_tokens=5),
    Ending("length", answer("too long"), "too l", "length", {"max_tokens": 5}, num_tokens=5),
    Ending("stop token", FOREVER, "ABC DE", "stop", {"stop_token_ids": [ord("F")]}, ord("F"), 7),
    Ending("stop string", FOREVER, "ABC ", "stop", {"stop": "DEFGHIJ"}, "DEFGHIJ", 11),
    Ending("first stop", FOREVER, "AB", "stop", {"stop": ["DEF", "C D", "E"]}, "C D", 5),
    Ending("stop at end", answer("say X"), "say ", "stop", {"stop": "X"}, "X", 5),
    Ending("stop and length", answer("say X or"), "say ", "stop", {"stop": "X", "max_tokens": 5}, "X", 5),
    Ending("held, no stop", answer("ABC DEFG"), "ABC DEFG", "stop", {"stop": "DEFGHIJ"}, num_tokens=9),
    Ending("held, length", FOREVER, "ABC DE", "length", {"stop": "DEFGHIJ", "max_tokens": 6}, num_tokens=6),
    Ending("abort", Script(spell("cut of"), end=None, event=FinishReason.ABORT), "cut of", "abort", num_tokens=6),
    Ending("abort, held", Script(spell("ABC D"), end=None, event=FinishReason.ABORT), "ABC D", "abort", {"stop": "DE"}),
    Ending("broken utf-8", Script((*spell("x"), 0xF0, 0x9F, EOS)), "x\ufffd", "stop", num_tokens=4),
]


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("case", ENDINGS, ids=lambda c: c.name)
def test_stream_and_whole_answer_end_alike(scene: Scene, case: Ending, chat: bool) -> None:
    scene.scripts["go"] = case.script
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "go"}]} if chat else {"prompt": "go"}
    body = {"model": "bytes", **prompt, **case.body}
    stream = scene.stream(path, **body, stream_options={"include_usage": True})
    assert stream.text() == case.text
    assert stream.finish_reasons() == [case.reason]
    terminal = stream.chunks[-2]["choices"][0]
    assert terminal["finish_reason"] == case.reason and terminal["stop_reason"] == case.stop_reason
    whole = scene.post(path, **body).json()
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if chat else choice["text"]) == case.text
    assert choice["finish_reason"] == case.reason and choice["stop_reason"] == case.stop_reason
    assert whole["usage"] == stream.chunks[-1]["usage"]
    if case.num_tokens is not None:
        assert whole["usage"]["completion_tokens"] == case.num_tokens


def test_a_stop_string_ends_the_work_too(scene: Scene) -> None:
    scene.scripts["go"] = Script(spell("ABC DEF"), end=None)
    scene.stream("/v1/completions", model="bytes", prompt="go", stop="C")
    stop = scene.pool.wait_for(lambda: scene.pool.messages(Stop))[0]
    assert stop.num_output_tokens == 3 and stop.request_id in scene.pool.submissions
    scene.gateway.wait_for(lambda: scene.gateway.state.engine.reader.num_live == 0)
    assert scene.gateway.metric("requests_aborted_total", reason="client_disconnect") == 0


@pytest.mark.parametrize("script", [
    Script(spell("half"), end=EndReason.ERROR),
    Script(spell("half"), end=None, event=FinishReason.ERROR, message="KeyError: 'secret'"),
], ids=["worker", "scheduler"])  # fmt: skip
def test_an_error_is_one_event_and_no_finish(scene: Scene, script: Script) -> None:
    scene.scripts["go"] = script
    body = {"model": "bytes", "prompt": "go"}
    stream = scene.broken_stream("/v1/completions", **body)
    assert stream.text() == "half" and stream.finish_reasons() == []
    assert [e for e in stream.events if e.data == "[DONE]"] == []
    errors = [c["error"] for c in stream.chunks if "error" in c]
    assert len(errors) == 1 and stream.chunks[-1] == {"error": errors[0]}
    request_id = stream.chunks[0]["id"]
    assert errors[0]["code"] == "generation_failed" and request_id in errors[0]["message"]
    assert "secret" not in str(errors) and "Error" not in errors[0]["message"]
    whole = scene.post("/v1/completions", **body)
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "generation_failed"
    assert "secret" not in whole.text


def test_a_late_rejection_names_its_reason(scene: Scene) -> None:
    scene.scripts["go"] = Script((), end=None, event=FinishReason.REJECTED, message="needs more blocks")
    body = {"model": "bytes", "prompt": "go"}
    whole = scene.post("/v1/completions", **body)
    assert whole.status_code == 400 and "needs more blocks" in whole.json()["error"]["message"]
    assert scene.broken_stream("/v1/completions", **body).chunks[-1]["error"]["code"] == "rejected"


def test_one_failing_prompt_of_several_ends_them_all(scene: Scene) -> None:
    scene.scripts["bad"] = Script(spell("x"), end=EndReason.ERROR)
    scene.scripts["good"] = Script(spell("y"), end=None)
    stream = scene.broken_stream("/v1/completions", model="bytes", prompt=["good", "bad"])
    assert "error" in stream.chunks[-1]
    aborted = scene.pool.wait_for(lambda: scene.pool.messages_of_abort())
    assert [a.request_id for a in aborted] == [next(i for i in scene.pool.submissions if not i.endswith("-1"))]


def test_a_deadline_is_a_finish_of_its_own(scene: Scene) -> None:
    """After tokens they are told, with the finish `timeout`; before the first one a whole answer is a 504."""
    scene.scripts["late"] = Script(spell("some text"), end=None, event=FinishReason.TIMEOUT, message="deadline")
    scene.scripts["never"] = Script((), end=None, event=FinishReason.TIMEOUT, message="queue_deadline")
    body = {"model": "bytes", "timeout_s": 3, "queue_timeout_s": 1.5, "first_token_timeout_s": 2}
    whole = scene.post("/v1/completions", prompt="late", **body).json()
    assert whole["choices"][0]["text"] == "some text" and whole["choices"][0]["finish_reason"] == "timeout"
    (submission,) = scene.pool.submissions.values()
    assert submission.deadlines == (1.5, 2, 3)
    stream = scene.stream("/v1/completions", prompt="late", **body)
    assert stream.text() == "some text" and stream.finish_reasons() == ["timeout"]
    nothing = scene.post("/v1/completions", prompt="never", **body)
    assert nothing.status_code == 504 and nothing.json()["error"]["code"] == "deadline_exceeded"
    assert scene.stream("/v1/completions", prompt="never", **body).finish_reasons() == ["timeout"]
    for bad in (0, -1, 1e9, "1"):
        refused = scene.post("/v1/completions", prompt="x", timeout_s=bad)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "timeout_s"
