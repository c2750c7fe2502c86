"""Several choices of one prompt: shapes, streams, endings, aborts (cases 57, 37, 72, 87)."""

import resource
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import Abort, EndReason, FinishReason, Stop
from shared.records import choice_id
from tests.fakes.byte_model import MAX_MODEL_LEN, answer, spell
from tests.fakes.scripted_pool import Script
from tests.integration.gateway.conftest import OpenScene, Scene
from tests.integration.gateway.test_bad_requests import check_error
from tests.integration.gateway.test_disconnects import send_request

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETION, CHAT], ids=["completion", "chat"])


def asking(path: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """The body of a request to `path`."""
    about = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": "bytes", **about, **fields}


def texts_of(body: dict[str, Any]) -> list[str]:
    """Of a whole answer, by index."""
    choices = body["choices"]
    assert [c["index"] for c in choices] == list(range(len(choices)))
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


@PATHS
def test_every_choice_has_its_own_text_ending_and_index(scene: Scene, path: str) -> None:
    scene.scripts["go"] = [
        answer("first"),
        answer("second X and more"),
        Script(spell("the third is long"), end=None),
        answer("4"),
    ]
    body = asking(path, "go", n=4, stop="X", max_tokens=10)
    whole = scene.post(path, **body).json()
    assert texts_of(whole) == ["first", "second ", "the third ", "4"]
    assert [c["finish_reason"] for c in whole["choices"]] == ["stop", "stop", "length", "stop"]
    assert [c["stop_reason"] for c in whole["choices"]] == [None, "X", None, None]
    stream = scene.stream(path, **body, stream_options={"include_usage": True})
    assert [stream.text(k) for k in range(4)] == texts_of(whole)
    assert [stream.finish_reasons(k) for k in range(4)] == [["stop"], ["stop"], ["length"], ["stop"]]
    prompt = whole["usage"]["prompt_tokens"]
    assert prompt == len(next(iter(scene.pool.submissions.values())).prompt_tokens) // 4
    assert whole["usage"]["completion_tokens"] == 6 + 8 + 10 + 2
    assert stream.chunks[-1]["usage"] == whole["usage"]


def test_choices_are_requests_of_one_group_in_the_pool(scene: Scene) -> None:
    scene.scripts["go"] = answer("x")
    first, second = (scene.post(COMPLETION, **asking(COMPLETION, "go", n=3, seed=5)).json() for _ in range(2))
    for answered in (first, second):
        found = [s for s in scene.pool.submissions.values() if s.group == answered["id"]]
        assert [s.request_id for s in found] == [choice_id(answered["id"], k) for k in range(3)]
        assert [(s.params.choice, s.params.seed) for s in found] == [(k, 5) for k in range(3)]


def test_a_stream_interleaves_choices_and_its_ids_tell_the_count_of_each(scene: Scene) -> None:
    """design.md §4.6: `id: 17,15`."""
    scene.scripts["go"] = [answer("abcdef"), answer("ghi"), Script(spell("jklm"), end=EndReason.LENGTH)]
    stream = scene.stream(COMPLETION, **asking(COMPLETION, "go", n=3))
    counts, seen = [0, 0, 0], []
    for event in stream.events[:-1]:
        assert event.event_id is not None
        (choice,) = event.data["choices"]
        told = [int(part.rstrip("eu")) for part in event.event_id.split(",")]
        changed = [k for k in range(3) if told[k] != counts[k]]
        assert changed in ([], [choice["index"]]) and all(a <= b for a, b in zip(counts, told, strict=True))
        counts = told
        seen.append(choice["index"])
    assert counts == [7, 4, 4]
    assert seen != sorted(seen), "the choices were meant to be interleaved"
    assert {event.data["id"] for event in stream.events[:-1]} == {stream.chunks[0]["id"]}


def test_one_choice_stops_while_the_other_goes_on(scene: Scene) -> None:
    """BEST-14 per choice: the stopped one has its terminal chunk, its request in the pool is ended, no other is."""
    scene.scripts["go"] = [
        Script(spell("one X one") * 9, end=None),
        Script((*spell("other"), *spell(" goes on")), end=EndReason.LENGTH, hold_after=5),
    ]
    with scene.gateway.http.stream(
        "POST", COMPLETION, json=asking(COMPLETION, "go", n=2, stop="X", stream=True)
    ) as response:
        lines = response.iter_lines()
        while '"finish_reason":"stop"' not in (line := next(lines)):
            assert '"finish_reason":"length"' not in line
        assert '"index":0' in line
        (stop,) = scene.pool.wait_for(lambda: scene.pool.messages(Stop))
        first = next(iter(scene.pool.submissions))
        assert (stop.request_id, stop.num_output_tokens) == (first, 5)
        scene.gateway.wait_for(lambda: scene.gateway.state.engine.reader.num_live == 1)
        scene.pool.release()
        rest = "".join(lines)
    assert '"finish_reason":"length"' in rest and "[DONE]" in rest and '"index":0' not in rest
    assert scene.pool.messages(Abort) == []


@pytest.mark.parametrize(
    "prompt", ["p", ["p", "q"], [112, 113], [[112], [113, 114]]], ids=["str", "strs", "ids", "lists"]
)
def test_indices_are_prompt_major_for_all_forms_of_a_prompt(scene: Scene, prompt: Any) -> None:
    """Case 57."""
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    names = [chr(p[0]) if isinstance(p, list) else p for p in prompt] if several else ["p"]
    for name in names:
        scene.scripts[name] = [answer(f"{name}0"), answer(f"{name}1 longer")]
    wanted = [text for name in names for text in (f"{name}0", f"{name}1 longer")]
    stream = scene.stream(COMPLETION, model="bytes", prompt=prompt, n=2, stream_options={"include_usage": True})
    assert [stream.text(k) for k in range(len(wanted))] == wanted
    assert all(len(stream.finish_reasons(k)) == 1 for k in range(len(wanted)))
    whole = scene.post(COMPLETION, model="bytes", prompt=prompt, n=2).json()
    assert texts_of(whole) == wanted
    num_prompt = sum(len(p) for p in prompt) if several else len(prompt)
    assert whole["usage"]["prompt_tokens"] == num_prompt
    assert whole["usage"]["completion_tokens"] == sum(len(text) + 1 for text in wanted)
    assert stream.chunks[-1]["usage"] == whole["usage"]


def test_cumulative_usage_counts_the_prompt_once(scene: Scene) -> None:
    """Case 37."""
    scene.scripts["go"] = [answer("abc"), answer("defgh")]
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = scene.stream(COMPLETION, **asking(COMPLETION, "go", n=2), stream_options=options)
    usages = [chunk["usage"] for chunk in stream.chunks]
    totals = [u["completion_tokens"] for u in usages]
    assert totals == sorted(totals) and totals[-1] == 4 + 6
    assert {u["prompt_tokens"] for u in usages} == {2}


def test_cached_tokens_are_those_of_the_first_choice(scene: Scene) -> None:
    """Case 72: that choices share their prompt is no cache hit of the caller."""
    scene.scripts["go"] = [answer("a", num_cached=1), answer("b", num_cached=2), answer("c", num_cached=2)]
    usage = scene.post(COMPLETION, **asking(COMPLETION, "go", n=3)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    scene.scripts["cold"] = [answer("a"), answer("b", num_cached=2)]
    usage = scene.post(COMPLETION, **asking(COMPLETION, "cold", n=2)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("fields", [{"n": 4, "stream": True}, {"n": 4}, {"best_of": 4}], ids=["stream", "n", "best_of"])
def test_leaving_aborts_every_choice(scene: Scene, fields: dict[str, Any]) -> None:
    scene.scripts["go"] = Script(spell("some text"), end=None)
    sock = send_request(scene, {"prompt": "go", **fields})
    reader = scene.gateway.state.engine.reader
    scene.gateway.wait_for(lambda: [c.committed for c in reader.channels] == [9] * 4)
    sock.close()
    aborts = scene.pool.wait_for(lambda: len(found := scene.pool.messages(Abort)) == 4 and found)
    assert {a.request_id for a in aborts} == set(scene.pool.submissions)
    assert scene.gateway.metric("requests_aborted_total", reason="client_disconnect") == 1
    assert reader.num_live == 0


def test_a_choice_that_has_ended_is_not_aborted(scene: Scene) -> None:
    scene.scripts["go"] = [answer("done"), Script(spell("on and on"), end=None)]
    sock = send_request(scene, {"prompt": "go", "n": 2})
    scene.gateway.wait_for(lambda: scene.gateway.state.engine.reader.num_live == 1)
    sock.close()
    aborts = scene.pool.wait_for(lambda: scene.pool.messages(Abort))
    assert [a.request_id for a in aborts] == [list(scene.pool.submissions)[1]]


def test_one_failing_choice_ends_them_all(scene: Scene) -> None:
    scene.scripts["go"] = [Script(spell("y"), end=None), Script(spell("x"), end=EndReason.ERROR)]
    stream = scene.broken_stream(COMPLETION, **asking(COMPLETION, "go", n=2))
    assert "error" in stream.chunks[-1]
    aborted = scene.pool.wait_for(lambda: scene.pool.messages_of_abort())
    assert [a.request_id for a in aborted] == [next(iter(scene.pool.submissions))]


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 1, "best_of": 3}, {"prompt": ["a", "b", "c"]}])
def test_a_full_queue_refuses_all_choices_or_none(open_scene: OpenScene, fields: dict[str, Any]) -> None:
    """Case 87: n counts as n. Two of four places are taken, three are needed: nothing is written."""
    scene = open_scene(pool_cap_requests=4)
    scene.pool.pause()
    answers: list[httpx.Response] = []

    def occupy() -> None:
        answers.append(scene.post(COMPLETION, model="bytes", prompt="wait", n=2))

    thread = threading.Thread(target=occupy)
    thread.start()
    scene.pool.wait_for(lambda: scene.pool.client.xlen(scene.pool.keys.intake) == 2)
    keys = sorted(scene.pool.client.keys(scene.pool.keys.request("*")))
    response = scene.post(COMPLETION, **{"model": "bytes", "prompt": "go", **fields})
    assert check_error(response, 429)["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
    assert sorted(scene.pool.client.keys(scene.pool.keys.request("*"))) == keys
    assert scene.pool.client.xlen(scene.pool.keys.intake) == 2
    scene.pool.resume()
    thread.join()
    assert texts_of(answers[0].json()) == ["OK: wait"] * 2
    assert scene.post(COMPLETION, **{"model": "bytes", "prompt": "go", **fields}).status_code == 200
    assert scene.pool.messages(Abort) == [], "what was refused has nothing to abort"


# ---------------------------------------------------------------- best_of


BAD_LOGPROBS, GOOD_LOGPROBS, BEST_LOGPROBS = [-3.0] * 9, [-0.5] * 9, [-0.25] * 9


@PATHS
def test_best_of_returns_the_most_probable_per_token(scene: Scene, path: str) -> None:
    scene.scripts["go"] = [
        answer("bad", logprobs=BAD_LOGPROBS),
        answer("good", logprobs=GOOD_LOGPROBS),
        answer("worse", logprobs=[-9.0] * 9),
        answer("the best", logprobs=BEST_LOGPROBS),
    ]
    whole = scene.post(path, **asking(path, "go", n=2, best_of=4)).json()
    assert texts_of(whole) == ["the best", "good"]
    assert whole["usage"]["completion_tokens"] == 4 + 5 + 6 + 9, "all that was generated"
    assert [s.params.with_logprobs for s in scene.pool.submissions.values()] == [True] * 4
    assert scene.gateway.metric("generation_tokens_total") == 24
    assert scene.gateway.state.engine.reader.num_live == 0 and scene.pool.messages(Abort) == []


def test_candidates_of_several_prompts_are_ranked_by_prompt(scene: Scene) -> None:
    scene.scripts["p"] = [answer("p bad", logprobs=BAD_LOGPROBS), answer("p good", logprobs=GOOD_LOGPROBS)]
    scene.scripts["q"] = [answer("q good", logprobs=GOOD_LOGPROBS), answer("q bad", logprobs=BAD_LOGPROBS)]
    whole = scene.post(COMPLETION, model="bytes", prompt=["p", "q"], best_of=2).json()
    assert texts_of(whole) == ["p good", "q good"]


@pytest.mark.parametrize("end", [None, EndReason.LENGTH], ids=["stopped", "ended meanwhile"])
def test_a_candidate_is_scored_up_to_its_stop_string(scene: Scene, end: EndReason | None) -> None:
    """Tokens past it count neither in text nor score, also if the worker ended the request before it was told."""
    scene.scripts["go"] = [
        answer("plain", logprobs=[-1.0] * 9),
        Script(spell("cut X nonsense"), end=end, logprobs=[-0.5] * 5 + [-99.0] * 20),
    ]
    whole = scene.post(COMPLETION, **asking(COMPLETION, "go", n=1, best_of=2, stop="X")).json()
    assert texts_of(whole) == ["cut "]
    assert whole["choices"][0]["stop_reason"] == "X"
    assert whole["usage"]["completion_tokens"] == 6 + 5
    if end is None:
        assert [s.num_output_tokens for s in scene.pool.messages(Stop)] == [5]


def test_a_gateway_that_missed_the_steps_ranks_alike(scene: Scene) -> None:
    """The ranking is a function of the records alone."""
    scripts = [
        answer("candidate one", logprobs=[-0.5] * 20, hold_after=3),
        answer("candidate two X", logprobs=[-0.25] * 15 + [-99] * 9, hold_after=3),
        answer("candidate three", logprobs=[-0.75] * 20, hold_after=3),
    ]
    scene.scripts["go"] = scripts
    results: list[Any] = []
    body = asking(COMPLETION, "go", n=2, best_of=3, stop="X")

    def ask() -> None:
        results.append(scene.post(COMPLETION, **body).json())

    thread = threading.Thread(target=ask)
    thread.start()
    reader = scene.gateway.state.engine.reader
    scene.gateway.wait_for(lambda: [c.committed for c in reader.channels] == [3] * 3)
    scene.pool.lost_steps = 4
    scene.pool.release()
    thread.join()
    assert reader.counters.rebuilds >= 1, "steps were meant to be missed"
    results.append(scene.post(COMPLETION, **body).json())
    assert texts_of(results[0]) == texts_of(results[1]) == ["candidate two ", "candidate one"]
    assert results[0]["usage"] == results[1]["usage"]


def test_a_failing_candidate_fails_the_request(scene: Scene) -> None:
    scene.scripts["go"] = [answer("x"), Script(spell("y"), end=EndReason.ERROR), Script(spell("z"), end=None)]
    response = scene.post(COMPLETION, **asking(COMPLETION, "go", best_of=3))
    assert check_error(response, 500)["code"] == "generation_failed"
    lasting = list(scene.pool.submissions)[2]
    scene.pool.wait_for(lambda: lasting in {a.request_id for a in scene.pool.messages(Abort)})


def test_an_aborted_candidate_is_told_as_such(scene: Scene) -> None:
    scene.scripts["go"] = Script(spell("cut of"), end=None, event=FinishReason.ABORT)
    whole = scene.post(COMPLETION, **asking(COMPLETION, "go", best_of=2)).json()
    assert texts_of(whole) == ["cut of"] and whole["choices"][0]["finish_reason"] == "abort"


# ---------------------------------------------------------------- bad values


BAD: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": 10**9}),
    ("n", {"n": 1.0}),
    ("n", {"n": "2"}),
    ("best_of", {"best_of": 0}),
    ("best_of", {"best_of": 129}),
    ("best_of", {"n": 3, "best_of": 2}),
    ("best_of", {"n": 1, "best_of": 2, "stream": True}),
    ("best_of", {"use_beam_search": True, "best_of": 33}),
    ("n", {"use_beam_search": True, "n": 33}),
    ("use_beam_search", {"use_beam_search": "yes"}),
    ("temperature", {"use_beam_search": True, "temperature": 0.5}),
    ("top_p", {"use_beam_search": True, "top_p": 0.5}),
    ("length_penalty", {"length_penalty": 2}),
    ("length_penalty", {"use_beam_search": True, "length_penalty": 11}),
    ("max_tokens", {"n": 3, "max_tokens": MAX_MODEL_LEN}),
    ("max_tokens", {"use_beam_search": True, "n": 3, "max_tokens": MAX_MODEL_LEN}),
]


def test_bad_values_name_their_field_and_queue_nothing(open_scene: OpenScene) -> None:
    """BEST-17, cases 48 and 49. Before SSE headers, also if a stream was asked for."""
    scene = open_scene(pool_cap_requests=100)
    for (param, fields), path, stream in product(BAD, (COMPLETION, CHAT), (False, True)):
        error = check_error(scene.post(path, **asking(path, "go", **{"stream": stream, **fields})))
        assert error["param"] == param and error["message"].startswith(param), (fields, error)
    too_many: list[tuple[str, Any]] = [("n", 101), ("best_of", 101), ("prompt", ["x"] * 101)]
    for param, value in too_many:
        error = check_error(scene.post(COMPLETION, **{**asking(COMPLETION, "go"), param: value}))
        assert error["param"] == param and "100" in error["message"]
    assert scene.pool.intake == []


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def test_many_choices_neither_block_the_gateway_nor_fill_its_memory(open_scene: OpenScene) -> None:
    """Case 49 (CVE-2026-34756, CVE-2024-8939): refused ones, and the largest that are accepted."""
    scene = open_scene(pool_step_s=0.01)
    long = "x" * (MAX_MODEL_LEN - 8)
    scene.scripts["x"] = answer("abc")
    assert len(texts_of(scene.post(COMPLETION, model="bytes", prompt=long, n=128).json())) == 128  # warm
    before, done, latencies = resident_mb(), threading.Event(), []

    def check_health() -> None:
        with httpx.Client(base_url=scene.gateway.url, trust_env=False) as http:
            while not done.is_set():
                begin = time.perf_counter()
                assert http.get("/health/live").status_code == 200
                latencies.append(time.perf_counter() - begin)

    thread = threading.Thread(target=check_health)
    thread.start()
    try:
        for value in (10**9, 129):
            for field in ("n", "best_of"):
                for _ in range(20):
                    check_error(scene.post(COMPLETION, model="bytes", prompt=[long] * 128, **{field: value}))
        for fields in ({"n": 128}, {"n": 2, "best_of": 128}, {"n": 128, "prompt": [long, long]}):
            body = {"model": "bytes", "prompt": long, **fields}
            assert set(texts_of(scene.post(COMPLETION, **body).json())) == {"abc"}
    finally:
        done.set()
        thread.join()
    assert sorted(latencies)[int(len(latencies) * 0.99)] < 0.5
    assert resident_mb() - before < 50
