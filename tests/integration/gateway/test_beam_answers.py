"""Beam search over HTTP: one request in the pool, its results from the final record."""

import threading
from typing import Any

import pytest

from shared.messages import Abort, EndReason, Hypothesis, Submit
from shared.packing import pack_int32
from tests.fakes.byte_model import EOS, spell
from tests.fakes.scripted_pool import Script
from tests.integration.gateway.conftest import OpenScene, Scene
from tests.integration.gateway.test_bad_requests import check_error
from tests.integration.gateway.test_choices import COMPLETION, PATHS, asking, texts_of
from tests.integration.gateway.test_disconnects import send_request

FOUND = (
    Hypothesis(pack_int32([*spell("to be"), EOS]), -0.5, EndReason.EOS),
    Hypothesis(pack_int32(spell("to be X or not")), -0.6, EndReason.LENGTH),
    Hypothesis(pack_int32(spell("to see")), -0.7, EndReason.LENGTH),
)


def beams(**options: Any) -> Script:
    return Script((), end=None, hypotheses=FOUND, **options)


@PATHS
@pytest.mark.parametrize("num_cached", [0, 1])
def test_results_are_those_of_the_record_best_first(scene: Scene, path: str, num_cached: int) -> None:
    scene.scripts["go"] = beams(num_cached=num_cached)
    body = asking(path, "go", n=3, best_of=4, use_beam_search=True, length_penalty=0.5, temperature=0, stop="X")
    whole = scene.post(path, **body).json()
    assert texts_of(whole) == ["to be", "to be ", "to see"]
    assert [c["finish_reason"] for c in whole["choices"]] == ["stop", "stop", "length"]
    assert [c["stop_reason"] for c in whole["choices"]] == [None, "X", None]
    (submission,) = scene.pool.submissions.values()
    params = submission.params
    assert (params.beam_width, params.num_hypotheses, params.length_penalty) == (4, 3, 0.5)
    assert whole["usage"]["completion_tokens"] == 6 + 7 + 6
    assert whole["usage"]["prompt_tokens"] == len(submission.prompt_tokens) // 4
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
    stream = scene.stream(path, **body, stream_options={"include_usage": True})
    assert [stream.text(k) for k in range(3)] == texts_of(whole)
    assert [stream.finish_reasons(k) for k in range(3)] == [["stop"], ["stop"], ["length"]]
    assert stream.chunks[-1]["usage"] == whole["usage"]
    assert stream.events[-2].event_id == "6e,7e,6eu"
    assert len(scene.pool.messages(Submit)) == 2
    scene.gateway.wait_for(lambda: scene.gateway.state.engine.reader.num_live == 0)
    assert scene.pool.messages(Abort) == []
    assert scene.gateway.state.engine.reader.counters.rebuilds == 0, "neighbours are not disturbed"


def test_a_search_without_results_is_an_error_not_an_empty_answer(scene: Scene) -> None:
    scene.scripts["go"] = Script((), end=None)
    body = asking(COMPLETION, "go", use_beam_search=True)
    assert check_error(scene.post(COMPLETION, **body), 500)["code"] == "internal_error"
    assert scene.broken_stream(COMPLETION, **body).chunks[-1]["error"]["code"] == "internal_error"


def test_every_prompt_is_searched_by_itself(scene: Scene) -> None:
    scene.scripts["p"] = Script((), end=None, hypotheses=FOUND[:2])
    scene.scripts["q"] = Script((), end=None, hypotheses=FOUND[1:])
    whole = scene.post(COMPLETION, model="bytes", prompt=["p", "q"], n=2, use_beam_search=True).json()
    assert texts_of(whole) == ["to be", "to be X or not", "to be X or not", "to see"]


def test_a_terminal_event_that_was_missed_is_made_up_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is lost to this reader; the record still tells."""
    reader = scene.gateway.state.engine.reader
    monkeypatch.setattr(reader.quiet, "quiet_s", 0.2)
    scene.scripts["go"] = Script((), end=None, hypotheses=FOUND[:1], hold_after=0)
    results: list[Any] = []

    def ask() -> None:
        results.append(scene.post(COMPLETION, **asking(COMPLETION, "go", use_beam_search=True)).json())

    thread = threading.Thread(target=ask)
    thread.start()
    scene.gateway.wait_for(lambda: reader.num_live == 1)
    monkeypatch.setattr(reader._live.follower, "apply", lambda _: [])
    scene.pool.release()
    thread.join()
    assert texts_of(results[0]) == ["to be"]
    assert reader.counters.rebuilds >= 1


def test_leaving_aborts_the_search(scene: Scene) -> None:
    scene.scripts["go"] = beams(hold_after=0)
    sock = send_request(scene, {"prompt": "go", "use_beam_search": True, "n": 3, "stream": True})
    scene.pool.wait_for(lambda: scene.pool.submissions)
    sock.close()
    (abort,) = scene.pool.wait_for(lambda: scene.pool.messages(Abort))
    assert abort == Abort(next(iter(scene.pool.submissions)), "client_disconnect")
    assert scene.gateway.state.engine.reader.num_live == 0


def test_pings_keep_a_silent_search_alive(open_scene: OpenScene) -> None:
    scene = open_scene(ping_interval_s=0.1)
    scene.scripts["go"] = beams(hold_after=0)
    timer = threading.Timer(0.5, scene.pool.release)
    timer.start()
    stream = scene.stream(COMPLETION, **asking(COMPLETION, "go", use_beam_search=True))
    timer.join()
    assert stream.text() == "to be" and len(stream.comments) >= 2
