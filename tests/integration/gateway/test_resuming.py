"""Streams that go on elsewhere: `Last-Event-ID` at any gateway, before and after the end, compared byte for byte."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.gateway.output.output_function import OutputFunction
from services.gateway.streams import custody, intake
from services.gateway.streams.sequences import READ_AT_ONCE
from services.gateway.text.tokenizer import TextTokenizer
from shared.keys import Keys
from shared.messages import Abort, Stop
from shared.scripts import attachments, submit
from tests.fakes.byte_model import answer, spell
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.scripted_pool import Script
from tests.fakes.sse_reader import SseStream, parse_sse
from tests.integration.gateway.conftest import OpenScene, Scene
from tests.integration.gateway.test_process import gateway_process, wait_ready

TEXT = "Grüße, 世界 👩‍👩‍👧! STOX then STOY, and so on"
"""Characters of several tokens, and text that looks like the beginning of a stop string."""
USAGE = {"stream_options": {"include_usage": True}}

Another = Callable[..., RunningGateway]


@pytest.fixture
def another(redis_url: str, byte_model: Path, byte_tokenizer: TextTokenizer) -> Iterator[Another]:
    """Starts one more gateway before the same pool."""
    with ExitStack() as stack:

        def start(**settings: Any) -> RunningGateway:
            gateway = RunningGateway(byte_tokenizer, model=byte_model, redis_url=redis_url, **settings)
            return stack.enter_context(gateway).wait_ready()

        yield start


def resume(gateway: RunningGateway, request_id: str, last: str | None, **headers: str) -> SseStream:
    """The rest of a stream, to its `[DONE]`."""
    given = headers | ({} if last is None else {"Last-Event-ID": last})
    with gateway.http.stream("GET", f"/v1/requests/{request_id}/stream", headers=given) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["x-request-id"] == request_id
        stream = parse_sse(response.iter_lines())
    assert stream.is_done
    return stream


def told(stream: SseStream, choice: int = 0) -> tuple[str, list[str], list[Any]]:
    return stream.text(choice), stream.finish_reasons(choice), [c["usage"] for c in stream.chunks if c.get("usage")]


def joined(begin: SseStream, num_events: int, rest: SseStream) -> SseStream:
    return SseStream([*begin.events[:num_events], *rest.events])


def check_every_cut(gateway: RunningGateway, whole: SseStream, num_choices: int = 1) -> None:
    """Cut behind each event: beginning and rest together are the whole, and only what follows is sent."""
    request_id = whole.chunks[0]["id"]
    for cut in range(1, len(whole.events)):
        rest = resume(gateway, request_id, whole.events[cut - 1].event_id)
        for choice in range(num_choices):
            assert told(joined(whole, cut, rest), choice) == told(whole, choice), (cut, whole.events[cut - 1])
        head = {(c["id"], c["created"], c["model"]) for c in [*whole.chunks, *rest.chunks]}
        assert len(head) == 1


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@pytest.mark.parametrize("stop", [[], ["STOY"], ["on", "never"]], ids=["eos", "stop", "stop_at_end"])
def test_after_the_end_every_cut_goes_on_exactly(
    scene: Scene, another: Another, endpoint: str, stop: list[str]
) -> None:
    scene.scripts["go"] = answer(TEXT)
    prompt = {"prompt": "go"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "go"}]}
    whole = scene.stream(f"/v1/{endpoint}", model="bytes", stop=stop, **prompt, **USAGE)
    assert whole.text() == (TEXT if not stop else TEXT[: TEXT.index(stop[0])])
    check_every_cut(scene.gateway, whole)
    check_every_cut(another(), whole)
    from_start = resume(scene.gateway, whole.chunks[0]["id"], "0")
    assert told(from_start) == told(resume(scene.gateway, whole.chunks[0]["id"], None)) == told(whole)


def test_a_finish_by_length_with_text_that_was_held(scene: Scene) -> None:
    """`ST` may begin a stop string: it comes with the finish, under the same number of tokens as before."""
    scene.scripts["go"] = answer("STOP")
    whole = scene.stream("/v1/completions", model="bytes", prompt="go", stop="STOY", max_tokens=3, **USAGE)
    assert whole.text() == "STO" and whole.finish_reasons() == ["length"]
    check_every_cut(scene.gateway, whole)


def test_several_choices_have_several_counts(scene: Scene, another: Another) -> None:
    scene.scripts["go"] = [answer(TEXT), answer("short"), answer("a little longer")]
    whole = scene.stream("/v1/completions", model="bytes", prompt="go", n=3, **USAGE)
    assert any("," in (e.event_id or "") for e in whole.events)
    check_every_cut(another(), whole, num_choices=3)


def test_several_prompts_too(scene: Scene) -> None:
    scene.scripts["one"], scene.scripts["two"] = answer(TEXT), answer("second")
    whole = scene.stream("/v1/completions", model="bytes", prompt=["one", "two"], **USAGE)
    assert whole.text(0) == TEXT and whole.text(1) == "second"
    check_every_cut(scene.gateway, whole, num_choices=2)


@pytest.mark.parametrize("folded", [False, True], ids=["from the log", "from record and log"])
def test_while_it_runs_every_cut_goes_on_exactly(scene: Scene, another: Another, folded: bool) -> None:
    """All cuts are read at once by a second gateway, beside the first client."""
    hold = len(TEXT.encode()) // 2
    scene.scripts["go"] = answer(TEXT, hold_after=hold)
    other = another()
    with scene.gateway.http.stream(
        "POST", "/v1/completions", json={"prompt": "go", "stream": True, "stop": "STOY", **USAGE}
    ) as response:
        request_id = response.headers["x-request-id"]
        scene.pool.wait_for(lambda: scene.pool.submissions)
        first = scene.gateway.state.engine.reader
        scene.gateway.wait_for(lambda: [c.committed for c in first.channels] == [hold])
        if folded:
            scene.pool.fold()
        cuts = [str(count) for count in range(1, hold + 1)]
        with ThreadPoolExecutor(len(cuts)) as threads:
            rests = [threads.submit(resume, other, request_id, cut) for cut in cuts]
            # the second gateway follows them all before the rest comes
            other.wait_for(lambda: other.state.engine.reader.num_live == len(cuts))
            scene.pool.release()
            whole = parse_sse(response.iter_lines())
            assert whole.is_done and whole.text() == TEXT[: TEXT.index("STOY")]
            for cut, rest in zip(cuts, [r.result() for r in rests], strict=True):
                text, *more = told(rest)
                assert [text_of(scene, request_id, int(cut)) + text, *more] == list(told(whole))
    assert other.metric("requests_resumed_total") == len(cuts)
    assert 0 < other.state.engine.reader.counters.adoptions < len(cuts)  # those that came together shared a reading
    assert scene.pool.messages(Abort) == []


def _count(event_id: str) -> int:
    return int(event_id.rstrip("eu"))


def text_of(scene: Scene, request_id: str, num_tokens: int) -> str:
    """What a client has seen after so many tokens of TEXT."""
    function = OutputFunction(scene.gateway.state.engine.tokenizer, scene.pool.submissions[request_id])
    return function.whole(spell(TEXT)[:num_tokens]).text


def test_resuming_is_fast(scene: Scene, another: Another) -> None:
    """The bar: 200 ms from connecting to the first event, here with 2,000 other entries in the log."""
    window = {"X-Resume-Window": "30"}
    scene.scripts["noise"] = Script(spell("x" * 400), end=None)
    scene.scripts["go"] = answer(TEXT, hold_after=9)
    other = another()
    with scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        for _ in range(5):
            scene.post("/v1/completions", prompt="noise", max_tokens=400)
        times = []
        for _ in range(5):  # the machine may be busy with other tests
            started = time.monotonic()
            with other.http.stream("GET", f"/v1/requests/{request_id}/stream", headers=window) as rest:
                next(line for line in rest.iter_lines() if line.startswith("data:"))
                times.append(time.monotonic() - started)
        assert min(times) < 0.2, times
        scene.pool.release()
        assert parse_sse(response.iter_lines()).is_done


def test_ids_that_are_none(scene: Scene, another: Another) -> None:
    whole = scene.stream("/v1/completions", model="bytes", prompt="go")
    request_id = whole.chunks[0]["id"]
    for bad in ("x", "-1", "1,2", "1.5", "9" * 30, "600", "1e,", "ue", "3u", "5" * 9000, "１"):
        headers = httpx.Headers({b"Last-Event-ID": bad.encode()})
        response = scene.gateway.http.get(f"/v1/requests/{request_id}/stream", headers=headers)
        assert response.status_code == 400 and response.json()["error"]["param"] == "Last-Event-ID", bad
    behind = _count(whole.events[-2].event_id or "") + 1
    last = {"Last-Event-ID": str(behind)}
    assert scene.gateway.http.get(f"/v1/requests/{request_id}/stream", headers=last).status_code == 400
    for unknown in ("cmpl-0", "cmpl-%00", "%ff", "x" * 4000):
        response = scene.gateway.http.get(f"/v1/requests/{unknown}/stream")
        assert response.status_code == 404 and response.json()["error"]["code"] == "request_not_found"
    assert told(resume(scene.gateway, request_id, None))[0] == whole.text()


def test_a_bad_id_does_not_end_a_running_request(scene: Scene) -> None:
    scene.scripts["go"] = answer(TEXT, hold_after=4)
    with scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        bad = scene.gateway.http.get(f"/v1/requests/{request_id}/stream", headers={"Last-Event-ID": "7,7"})
        assert bad.status_code == 400
        scene.pool.release()
        assert parse_sse(response.iter_lines()).text() == TEXT
    assert scene.pool.messages(Abort) == []


def test_a_response_belongs_to_its_tenant(open_scene: OpenScene) -> None:
    scene = open_scene(tenant_header="X-Tenant")
    http = scene.gateway.http
    request_id = http.post("/v1/completions", json={"prompt": "go"}, headers={"X-Tenant": "a"}).json()["id"]
    path = f"/v1/requests/{request_id}/stream"
    assert http.get(path, headers={"X-Tenant": "a"}).status_code == 200
    assert http.get(path, headers={"X-Tenant": "b"}).status_code == 404
    assert http.get(path).status_code == 404


# ---------------------------------------------------------------- leaving and coming back


def leave_while_held(scene: Scene, headers: dict[str, str], **body: Any) -> tuple[str, int]:
    """Open a stream, read its first events, close; its id and the number of tokens read."""
    request = {"prompt": "go", "stream": True, **body}
    with scene.gateway.http.stream("POST", "/v1/completions", json=request, headers=headers) as response:
        lines = response.iter_lines()
        count = next(_count(line[4:]) for line in lines if line.startswith("id: "))
        return response.headers["x-request-id"], count


def wait_left(scene: Scene) -> None:
    scene.gateway.wait_for(lambda: scene.gateway.metric("requests_detached_total", reason="client_disconnect") == 1)


@pytest.mark.parametrize("how", ["window", "key", "background"])
def test_who_asked_for_it_may_come_back(scene: Scene, another: Another, how: str) -> None:
    scene.scripts["go"] = answer(TEXT, hold_after=20)
    headers = {"window": {"X-Resume-Window": "30"}, "key": {"Idempotency-Key": "k"}, "background": {}}[how]
    request_id, count = leave_while_held(scene, headers, **({"background": True} if how == "background" else {}))
    wait_left(scene)
    scene.pool.release()
    rest = resume(another(), request_id, str(count))
    assert text_of(scene, request_id, count) + rest.text() == TEXT
    assert told(resume(scene.gateway, request_id, "0"))[0] == TEXT
    assert scene.pool.messages(Abort) == []


def test_a_window_stays_ahead_while_the_client_is_here(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch, keys: Keys
) -> None:
    """Also a short one, and also when the client does nothing but listen."""
    monkeypatch.setattr(custody, "LEAST_HELD_S", 1.0)
    monkeypatch.setattr(custody, "COMING_BACK_S", 0.0)
    monkeypatch.setattr(custody, "TURN_S", 0.1)
    scene = open_scene()
    scene.scripts["go"] = answer(TEXT, hold_after=3)
    headers = {"X-Resume-Window": "1"}
    body = {"prompt": "go", "stream": True}
    with scene.gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        request_id = response.headers["x-request-id"]
        client: Any = scene.pool.client
        first = client.zscore(keys.windows, request_id)
        time.sleep(1.5)
        assert scene.pool.messages(Abort) == []
        assert client.zscore(keys.windows, request_id) - first > 1000
        scene.pool.release()
        assert parse_sse(response.iter_lines()).text() == TEXT


def test_others_wait_longer_than_a_gateway_whose_commands_hang(scene: Scene) -> None:
    """While Redis is away a command hangs until its time-out, then one connects, and only then pushes windows."""
    pool = scene.gateway.state.engine.custody._client.connection_pool
    timeouts = pool.connection_kwargs["socket_timeout"] + pool.connection_kwargs["socket_connect_timeout"]
    assert timeouts + custody.TURN_S < custody.COMING_BACK_S
    least_s = attachments.LEAST_HELD_S
    assert timeouts + custody.TURN_S < least_s - (least_s / custody.PUSHES_PER_WINDOW - custody.TURN_S)


def test_nobody_comes_back_within_the_window(scene: Scene, keys: Keys) -> None:
    scene.scripts["go"] = Script(spell(TEXT), end=None)
    request_id, _ = leave_while_held(scene, {"X-Resume-Window": "1"})
    left = time.monotonic()
    (abort,) = scene.pool.wait_for(lambda: scene.pool.messages(Abort), timeout_s=6)
    assert time.monotonic() - left > 0.9
    assert abort.request_id == request_id and abort.cause == "window_expired"
    scene.gateway.wait_for(lambda: scene.gateway.state.engine.reader.num_live == 0)
    assert scene.pool.client.zcard(keys.windows) == 0
    rest = resume(scene.gateway, request_id, "0")
    assert rest.finish_reasons() == ["abort"]


def test_a_stop_string_ends_it_while_nobody_reads(scene: Scene) -> None:
    scene.scripts["go"] = answer(TEXT + "x" * 300, hold_after=5)
    request_id, _ = leave_while_held(scene, {"X-Resume-Window": "30"}, stop="STOY", max_tokens=400)
    wait_left(scene)
    scene.pool.release()
    (stop,) = scene.pool.wait_for(lambda: scene.pool.messages(Stop))
    assert stop.request_id == request_id
    assert told(resume(scene.gateway, request_id, "0"))[0] == TEXT[: TEXT.index("STOY")]
    scene.gateway.wait_for(lambda: not len(scene.gateway.state.engine.background))


def test_only_the_latest_attachment_may_abort(scene: Scene, another: Another) -> None:
    """The first connection ends after the client has come back elsewhere: that must not end the request."""
    scene.scripts["go"] = answer(TEXT, hold_after=5)
    other = another()
    with ExitStack() as stack:
        first = stack.enter_context(
            scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True})
        )
        request_id = first.headers["x-request-id"]
        second = stack.enter_context(other.http.stream("GET", f"/v1/requests/{request_id}/stream"))
        first.close()
        scene.gateway.wait_for(lambda: scene.gateway.metric("requests_aborted_total", reason="client_disconnect") == 1)
        time.sleep(0.1)
        assert scene.pool.messages(Abort) == []
        second.close()
        (abort,) = scene.pool.wait_for(lambda: scene.pool.messages(Abort))
        assert abort == Abort(request_id, "client_disconnect", 1)


def test_a_long_answer_is_taken_over_in_parts(open_scene: OpenScene) -> None:
    """The event loop serves others in between."""
    scene = open_scene()
    scene.scripts["go"] = answer("x" * 400)
    request_id = scene.post("/v1/completions", prompt="go", max_tokens=450).json()["id"]
    whole = resume(scene.gateway, request_id, "0")
    assert whole.text() == "x" * 400
    assert [e.event_id for e in whole.events if e.event_id] == [str(READ_AT_ONCE), "401e"]


def test_a_second_stream_that_leaves_does_not_end_the_first(
    scene: Scene, another: Another, monkeypatch: pytest.MonkeyPatch, keys: Keys
) -> None:
    """Neither at once nor by a shorter window: who is here says so in time."""
    monkeypatch.setattr(attachments, "LEAST_HELD_S", 1.0)
    monkeypatch.setattr(custody, "NEARLY_OVER_S", 0.5)
    monkeypatch.setattr(custody, "TURN_S", 0.1)
    scene.scripts["go"] = answer(TEXT, hold_after=5)
    other = another()
    with scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as first:
        request_id = first.headers["x-request-id"]
        for headers in ({"X-Resume-Window": "1"}, {}):
            with other.http.stream("GET", f"/v1/requests/{request_id}/stream", headers=headers) as second:
                assert second.status_code == 200
            other.wait_for(lambda: other.state.engine.reader.num_live == 0 or len(other.state.engine.background))
        client: Any = scene.pool.client
        scene.gateway.wait_for(lambda: client.zscore(keys.windows, request_id) < (time.time() + 1) * 1000)
        time.sleep(1.5)
        assert scene.pool.messages(Abort) == []
        scene.pool.release()
        assert parse_sse(first.iter_lines()).text() == TEXT


@pytest.mark.parametrize("code", ["internal_error", "redis_unreachable", "pool_unavailable", "log_gap"])
def test_what_a_gateway_could_not_finish_goes_on_elsewhere(scene: Scene, another: Another, code: str) -> None:
    scene.scripts["go"] = answer(TEXT, hold_after=9)
    failing = another()
    with failing.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        failing.loop.call_soon_threadsafe(failing.state.engine.reader.fail_all, code, "trouble")
        with pytest.raises(httpx.RemoteProtocolError):
            list(response.iter_lines())
    failing.wait_for(lambda: failing.metric("requests_detached_total", reason=code) == 1)
    scene.pool.release()
    assert resume(scene.gateway, request_id, "0").text() == TEXT
    assert scene.pool.messages(Abort) == []


def test_a_submission_that_was_not_confirmed_is_found_under_its_key(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued, but no reply came: the client is told 503, and its second try must not meet an aborted request."""
    scene.scripts["go"] = answer(TEXT, hold_after=5)

    async def without_reply(*args: Any, **options: Any) -> None:
        await submit(*args, **options)
        raise redis.ConnectionError

    headers = {"Idempotency-Key": "k"}
    with monkeypatch.context() as patch:
        patch.setattr(intake, "submit", without_reply)
        first = scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=headers)
        assert first.status_code == 503
    scene.pool.wait_for(lambda: scene.pool.submissions)
    scene.pool.release()
    second = scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=headers)
    assert second.json()["choices"][0] | {"text": TEXT, "finish_reason": "stop"} == second.json()["choices"][0]
    assert len(scene.pool.submissions) == 1 and scene.pool.messages(Abort) == []


def test_a_killed_gateway_costs_nothing(scene: Scene, byte_model: Path, redis_url: str) -> None:
    """kill -9 while the stream runs; the client goes on at another gateway with what it has."""
    scene.scripts["go"] = answer(TEXT, hold_after=21)
    with gateway_process(byte_model, redis_url) as (process, url):
        wait_ready(url)
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "go", "stream": True}) as response:
            request_id = response.headers["x-request-id"]
            with pytest.raises(httpx.TransportError):
                for line in response.iter_lines():
                    lines.append(line)
                    if "🤷" in line or '"text":" "' in line:
                        process.send_signal(signal.SIGKILL)
    begin = parse_sse(lines)
    assert begin.events and not begin.is_done
    scene.pool.release()
    rest = resume(scene.gateway, request_id, begin.events[-1].event_id)
    assert begin.text() + rest.text() == TEXT
    assert scene.pool.messages(Abort) == []


def test_a_killed_gateway_whose_clients_stay_away_leaves_nothing(
    scene: Scene, byte_model: Path, redis_url: str
) -> None:
    scene.scripts["go"] = Script(spell("xyz"), end=None)
    with gateway_process(byte_model, redis_url, resume_window_s="2") as (process, url):
        wait_ready(url)
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "go", "stream": True}) as response:
            request_id = response.headers["x-request-id"]
            process.kill()
        (abort,) = scene.pool.wait_for(lambda: scene.pool.messages(Abort), timeout_s=8)
    assert abort.request_id == request_id and abort.cause == "window_expired"


def test_who_comes_back_after_its_gateway_was_killed_and_leaves_is_not_waited_for(
    scene: Scene, byte_model: Path, redis_url: str
) -> None:
    """The dead gateway still holds the request, and promised an hour."""
    scene.scripts["go"] = Script(spell("xyz"), end=None)
    with gateway_process(byte_model, redis_url, resume_window_s="3600") as (process, url):
        wait_ready(url)
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "go", "stream": True}) as response:
            request_id = response.headers["x-request-id"]
            process.kill()
    with scene.gateway.http.stream("GET", f"/v1/requests/{request_id}/stream") as again:
        assert again.status_code == 200
    left = time.monotonic()
    (abort,) = scene.pool.wait_for(lambda: scene.pool.messages(Abort), timeout_s=12)
    assert time.monotonic() - left > attachments.LEAST_HELD_S - 1
    assert abort.request_id == request_id and abort.cause == "window_expired"


@pytest.mark.parametrize("num_told", [9, 11])
def test_streams_that_a_shutdown_cuts_go_on_elsewhere(scene: Scene, another: Another, num_told: int) -> None:
    """Once between two characters, and once inside one: half of it was told together with the error, as U+FFFD."""
    scene.scripts["go"] = answer(TEXT, hold_after=num_told)
    leaving = another(shutdown_grace_s=0)
    lines: list[str] = []
    with leaving.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        it = response.iter_lines()
        lines.append(next(it))
        leaving.wait_for(lambda: leaving.state.engine.reader.channels[0].committed == num_told)
        leaving.begin_exit()
        with pytest.raises(httpx.RemoteProtocolError):
            lines.extend(it)
    begin = parse_sse(lines)
    assert begin.chunks[-1]["error"]["code"] == "shutting_down"
    scene.pool.release()
    last = [e.event_id for e in begin.events if e.event_id][-1]
    text = "".join(c["choices"][0]["text"] for c in begin.chunks[:-1])
    assert text == TEXT.encode()[:num_told].decode(errors="ignore")
    assert text + resume(scene.gateway, request_id, last).text() == TEXT
    assert scene.pool.messages(Abort) == []


# ---------------------------------------------------------------- idempotency keys


def test_a_repeated_post_is_the_same_request(scene: Scene, another: Another) -> None:
    """Case 92."""
    scene.scripts["go"] = answer(TEXT, hold_after=5)
    other = another()
    body = {"prompt": "go", "temperature": 0.5, "stream": True, **USAGE}
    same = dict(reversed(list(body.items())))

    def post(gateway: RunningGateway, body: dict[str, Any]) -> tuple[str, SseStream]:
        headers = {"Idempotency-Key": "key-1"}
        with gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            return response.headers["x-request-id"], parse_sse(response.iter_lines())

    with ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(post, (scene.gateway, other)[i % 2], (body, same)[i // 4]) for i in range(8)]
        scene.gateway.wait_for(lambda: scene.gateway.state.engine.reader.num_live == 4)
        other.wait_for(lambda: other.state.engine.reader.num_live == 4)
        scene.pool.release()
        results = [job.result() for job in jobs]
    assert len(scene.pool.submissions) == 1
    assert {request_id for request_id, _ in results} == set(scene.pool.submissions)
    assert all(told(stream) == told(results[0][1]) and stream.text() == TEXT for _, stream in results)
    late, again = post(scene.gateway, body)
    assert late in scene.pool.submissions and told(again) == told(results[0][1])


def test_a_repeated_post_may_say_what_it_has(scene: Scene) -> None:
    scene.scripts["go"] = answer(TEXT)
    headers = {"Idempotency-Key": "key-1"}
    body = {"prompt": "go", "stream": True}
    with scene.gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        whole = parse_sse(response.iter_lines())
    cut = 7
    headers["Last-Event-ID"] = whole.events[cut - 1].event_id or ""
    with scene.gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        rest = parse_sse(response.iter_lines())
    assert told(joined(whole, cut, rest)) == told(whole)


def test_a_post_that_has_a_beginning_never_gets_another_answer(scene: Scene) -> None:
    """A key that Redis lost, or that expired, stands for nothing: a new answer behind the old beginning was told."""
    http, body = scene.gateway.http, {"prompt": "go", "stream": True}

    def post(**headers: str) -> httpx.Response:
        return http.post("/v1/completions", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    unknown = post(Idempotency_Key="key-1", Last_Event_ID="3")
    assert unknown.status_code == 409 and unknown.json()["error"]["code"] == "idempotency_conflict"
    for headers in ({"Last_Event_ID": "3"}, {"Last_Event_ID": "3,4", "Idempotency_Key": "key-1"}):
        refused = post(**headers)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "Last-Event-ID"
    assert not scene.pool.submissions
    first = post(Idempotency_Key="key-1", Last_Event_ID="0")
    assert first.status_code == 200 and len(scene.pool.submissions) == 1
    rest = post(Idempotency_Key="key-1", Last_Event_ID="1")
    assert rest.status_code == 200 and rest.headers["x-request-id"] == first.headers["x-request-id"]
    assert len(scene.pool.submissions) == 1


def test_keys_and_bodies(open_scene: OpenScene) -> None:
    scene = open_scene(tenant_header="X-Tenant")

    def post(key: str, prompt: str = "go", tenant: str = "a", **more: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key, "X-Tenant": tenant}
        return scene.gateway.http.post("/v1/completions", json={"prompt": prompt, **more}, headers=headers)

    first = post("k").json()
    assert post("k").json() == first
    conflict = post("k", prompt="other")
    assert conflict.status_code == 409 and conflict.json()["error"]["code"] == "idempotency_conflict"
    assert post("k", max_tokens=3).status_code == 409
    other = post("k", tenant="b").json()
    assert other["id"] != first["id"]
    assert post("k2").json()["id"] != first["id"]
    for bad in ("", "x" * 256, "ä"):
        headers = httpx.Headers({b"Idempotency-Key": bad.encode()})
        response = scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["param"] == "Idempotency-Key"
    for bad in ("0", "-1", "nan", "1e3", "4000", "soon"):
        headers = httpx.Headers({"X-Resume-Window": bad})
        response = scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["param"] == "X-Resume-Window", bad
    assert len(scene.pool.submissions) == 3


def test_an_expired_answer_is_told_as_such(scene: Scene, keys: Keys) -> None:
    """A key outlives the record that it stands for."""
    headers = {"Idempotency-Key": "k"}
    first = scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=headers).json()
    scene.pool.client.delete(keys.request(first["id"]))
    again = scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=headers)
    assert again.status_code == 409 and "expired" in again.json()["error"]["message"]
    assert scene.gateway.http.get(f"/v1/requests/{first['id']}/stream").status_code == 404


def test_a_whole_answer_survives_its_connection(scene: Scene) -> None:
    """Not streamed: the connection is lost while it is computed, the repeated POST gets the one answer."""
    scene.scripts["go"] = answer(TEXT, hold_after=5)
    data = json.dumps({"prompt": "go"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", scene.gateway.settings.port)) as sock:
        sock.sendall(head.encode() + data)
        scene.pool.wait_for(lambda: scene.pool.submissions)
    wait_left(scene)
    scene.pool.release()
    response = scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers={"Idempotency-Key": "k"})
    assert response.json()["choices"][0]["text"] == TEXT
    assert response.headers["x-request-id"] == response.json()["id"] == next(iter(scene.pool.submissions))
    assert len(scene.pool.submissions) == 1 and scene.pool.messages(Abort) == []


def test_nothing_is_left_in_windows(scene: Scene, keys: Keys) -> None:
    for _ in range(3):
        scene.post("/v1/completions", prompt="go")
    scene.stream("/v1/completions", prompt="go", n=2)
    scene.gateway.wait_for(lambda: scene.pool.client.zcard(keys.windows) == 0)
