"""A gateway that is behind writes less often, and loses nothing; one that is not writes at once."""

import threading
import time

import pytest

from services.gateway.streams.reader import StepLogReader
from tests.fakes.byte_model import answer
from tests.integration.gateway.conftest import OpenScene, Scene

TEXT = "".join(chr(97 + index % 26) for index in range(200))


def num_events(scene: Scene) -> int:
    """Events of a stream over TEXT, which must be whole."""
    scene.scripts["go"] = answer(TEXT)
    stream = scene.stream("/v1/completions", model="bytes", prompt="go", max_tokens=len(TEXT) + 1)
    assert stream.text() == TEXT
    return len(stream.chunks)


def test_a_stream_grows_with_its_tokens_and_not_with_their_square(scene: Scene) -> None:
    """Case 95: a delta never carries the text so far. Of twice as many events each has the same bytes."""
    sizes = []
    for count in (100, 200):
        scene.scripts["go"] = answer(TEXT[:count])
        body = {"model": "bytes", "prompt": "go", "max_tokens": count + 1, "stream": True}
        with scene.gateway.http.stream("POST", "/v1/completions", json=body) as response:
            sizes.append(len(response.read()))
    assert sizes[1] - sizes[0] < 100 * 260  # bytes of one token's event: its head is most of them
    assert sizes[1] < 2.1 * sizes[0]


def test_behind_a_stream_is_written_at_most_once_per_interval(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = property(lambda reader: True, lambda reader, value: None)
    monkeypatch.setattr(StepLogReader, "is_behind", always, raising=False)
    scene = open_scene(stream_interval_s=0.25, pool_step_s=0.01)
    started = time.monotonic()
    found = num_events(scene)
    assert found <= 2 + (time.monotonic() - started) / 0.25
    assert found < len(TEXT) / 4


def test_a_reader_that_was_held_up_knows_that_it_is_behind(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    heard = property(lambda reader: told[-1], lambda reader, value: told.append(value))
    monkeypatch.setattr(StepLogReader, "is_behind", heard, raising=False)
    scene = open_scene(pool_step_s=0.01)
    threading.Timer(0.3, scene.gateway.loop.call_soon_threadsafe, (time.sleep, 0.5)).start()
    num_events(scene)
    assert any(told) and not all(told)
