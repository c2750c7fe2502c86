"""Many requests from one log: rows interleave, steps go missing, Redis goes away; the text stays exact."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from services.cli.ports import free_port
from services.cli.redis_server import find_redis_server
from services.gateway.text.tokenizer import TextTokenizer
from shared.keys import Keys
from shared.messages import FIELD, EndReason, FinishReason, StepResult, encode
from shared.redis_client import connect
from tests.fakes.byte_model import answer, spell
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.scripted_pool import Script, ScriptedPool
from tests.fakes.sse_reader import SseStream, parse_sse
from tests.integration.gateway.conftest import OpenScene, Scene


class Streams:
    """Several streams at once, each in a thread."""

    def __init__(self, scene: Scene, prompts: list[str], **body: Any) -> None:
        self.results: dict[str, SseStream] = {}
        self._threads = [threading.Thread(target=self._run, args=(scene, p, body), daemon=True) for p in prompts]
        for thread in self._threads:
            thread.start()

    def _run(self, scene: Scene, prompt: str, body: dict[str, Any]) -> None:
        self.results[prompt] = scene.stream("/v1/completions", model="bytes", prompt=prompt, **body)

    def texts(self, timeout_s: float = 20) -> dict[str, str]:
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0, until - time.monotonic()))
            assert not thread.is_alive(), "a stream hangs"
        return {prompt: stream.text() for prompt, stream in self.results.items()}


class BrokenStream:
    """One stream in a thread that is expected to break."""

    def __init__(self, scene: Scene, prompt: str) -> None:
        self._results: list[SseStream] = []
        self._thread = threading.Thread(target=self._run, args=(scene, prompt), daemon=True)
        self._thread.start()

    def _run(self, scene: Scene, prompt: str) -> None:
        self._results.append(scene.broken_stream("/v1/completions", model="bytes", prompt=prompt))

    def error_code(self) -> str:
        """The code of its error event, which comes last."""
        self._thread.join(15)
        code: str = self._results[0].chunks[-1]["error"]["code"]
        return code


def committed(scene: Scene) -> int:
    return sum(c.committed for c in scene.gateway.state.engine.reader.channels)


def test_rows_of_one_worker_and_of_two_interleave(open_scene: OpenScene) -> None:
    scene = open_scene(pool_workers=("worker-0", "worker-1"))
    texts = {f"<{i}>": f"stream {i}: " + chr(ord("a") + i) * (20 + 7 * i) for i in range(12)}
    for i, (prompt, text) in enumerate(texts.items()):
        scene.scripts[prompt] = answer(text, worker=f"worker-{i % 2}")
    assert Streams(scene, list(texts)).texts() == texts
    assert scene.gateway.state.engine.reader.counters.rebuilds == 0


def test_every_choice_has_its_own_rows_again_when_rows_are_reused(scene: Scene) -> None:
    for i in range(30):
        assert scene.text_of(f"n{i}") == f"OK: n{i}"


@pytest.mark.parametrize("lost", [1, 3])
def test_missing_steps_come_from_the_records(open_scene: OpenScene, lost: int) -> None:
    scene = open_scene(pool_workers=("worker-0", "worker-1"))
    texts = {"left": "the left text, long enough to lose some of it", "right": "the right text, which loses nothing"}
    scene.scripts["left"] = answer(texts["left"], hold_after=10, worker="worker-0")
    scene.scripts["right"] = answer(texts["right"], hold_after=10, worker="worker-1")
    scene.scripts["new"] = answer("started after the gap")
    streams = Streams(scene, list(texts))
    scene.gateway.wait_for(lambda: committed(scene) == 20)
    scene.pool.lost_steps = lost
    scene.pool.release()
    assert streams.texts() == texts
    assert scene.pool.lost_steps == 0
    assert scene.gateway.state.engine.reader.counters.rebuilds >= 1
    assert scene.text_of("new") == "started after the gap"


def test_a_lost_last_step_comes_from_the_final_record(scene: Scene) -> None:
    scene.scripts["go"] = answer("complete", hold_after=8)
    streams = Streams(scene, ["go"])
    scene.gateway.wait_for(lambda: committed(scene) == 8)
    scene.pool.lost_steps = 1  # the one with EOS: only the terminal event and the record tell of it
    scene.pool.release()
    assert streams.texts() == {"go": "complete"}
    assert streams.results["go"].finish_reasons() == ["stop"]


def test_foreign_and_broken_entries_are_skipped(scene: Scene, redis_client: redis.Redis, keys: Keys) -> None:
    scene.scripts["go"] = answer("unharmed", hold_after=3)
    streams = Streams(scene, ["go"])
    scene.gateway.wait_for(lambda: committed(scene) == 3)
    for payload in (b"", b"\x00", b"\x93\xa6step/9\x01\x02", b"\xff" * 50, b"\x91" * 5000):
        redis_client.xadd(keys.steps, {FIELD: payload})
    redis_client.xadd(keys.steps, {"other": b"x"})
    request_id = next(iter(scene.pool.submissions))
    for step in (
        StepResult("ghost-0", 1, 1, tokens=b"cut", joined=((0, request_id, 0),)),
        StepResult("ghost-1", 1, 1, joined=((0, request_id, 3),), ended=((0, 99),)),
    ):
        redis_client.xadd(keys.steps, {FIELD: encode(step)})
    scene.pool.release()
    assert streams.texts() == {"go": "unharmed"}
    assert scene.gateway.state.engine.reader.counters.unreadable == 8


def test_a_lost_record_ends_the_stream_with_an_error(
    open_scene: OpenScene, redis_client: redis.Redis, keys: Keys
) -> None:
    scene = open_scene()
    scene.gateway.state.engine.reader.quiet.quiet_s = 0.3
    scene.scripts["go"] = Script(spell("x"), end=None)
    broken = BrokenStream(scene, "go")
    scene.gateway.wait_for(lambda: committed(scene) == 1)
    redis_client.delete(keys.request(next(iter(scene.pool.submissions))))
    assert broken.error_code() == "request_lost"


def test_a_pool_that_stays_away_ends_streams_and_refuses_new_ones(open_scene: OpenScene) -> None:
    """Case 15, BEST-16."""
    scene = open_scene(outage_limit_s=1.5, admission_grace_s=0.5)
    scene.gateway.state.engine.reader.quiet.quiet_s = 0.3
    scene.scripts["go"] = Script(spell("x"), end=None)
    broken = BrokenStream(scene, "go")
    scene.gateway.wait_for(lambda: committed(scene) == 1)
    scene.pool.stop()
    assert broken.error_code() == "pool_unavailable"
    refused = scene.post("/v1/completions", model="bytes", prompt="go")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_leader"
    assert int(refused.headers["retry-after"]) >= 1


class RestartableRedis:
    """A Redis of the test's own that can be killed and started again on the same data."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [str(find_redis_server().path), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client = connect(self.url)
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.RedisError:
                time.sleep(0.02)
        client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RestartableRedis]:
    server = RestartableRedis(tmp_path)
    yield server
    server.kill()


def test_streams_survive_a_restart_of_redis(
    own_redis: RestartableRedis, byte_model: Path, byte_tokenizer: TextTokenizer, keys: Keys
) -> None:
    text = "written before and after Redis was away"
    script = answer(text, hold_after=12)
    with (
        ScriptedPool(own_redis.url, keys, lambda s: script) as pool,
        RunningGateway(byte_tokenizer, model=byte_model, redis_url=own_redis.url) as gateway,
    ):
        scene = Scene(gateway.wait_ready(), pool)
        streams = Streams(scene, ["go"])
        gateway.wait_for(lambda: committed(scene) == 12)
        pool.pause()
        time.sleep(0.1)
        own_redis.kill()
        gateway.wait_for(lambda: gateway.http.get("/health/ready").json().get("reason") == "redis_unreachable")
        assert gateway.http.get("/health/live").status_code == 200
        refused = gateway.http.post("/v1/completions", json={"model": "bytes", "prompt": "no"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "redis_unreachable"
        own_redis.start()
        pool.resume()
        pool.release()
        assert streams.texts() == {"go": text}
        assert gateway.state.engine.reader.counters.failures >= 1
        gateway.wait_ready()


def test_a_flushed_redis_ends_streams_and_serves_again(open_scene: OpenScene, redis_client: redis.Redis) -> None:
    """No connection breaks, and nobody waits for a stream to have been quiet for a while."""
    scene = open_scene()
    scene.gateway.state.engine.reader.quiet.quiet_s = 3600
    scene.scripts["go"] = Script(spell("x"), end=None)
    broken = BrokenStream(scene, "go")
    scene.gateway.wait_for(lambda: committed(scene) == 1)
    scene.pool.stop()
    redis_client.flushall()
    assert broken.error_code() == "log_rolled_back"
    with ScriptedPool(scene.gateway.settings.redis_url, Keys("test"), lambda s: answer("again")):
        scene.gateway.wait_ready()
        assert scene.text_of("x") == "again"


def test_a_request_that_redis_lost_was_rolled_back(scene: Scene, redis_client: redis.Redis, keys: Keys) -> None:
    """Redis was started anew and does not know the request any more: no record says that it ever was."""
    reader = scene.gateway.state.engine.reader
    scene.scripts["go"] = Script(spell("x"), end=None)
    broken = BrokenStream(scene, "go")
    scene.gateway.wait_for(lambda: committed(scene) == 1)
    redis_client.delete(keys.request(next(iter(scene.pool.submissions))))
    reader._source._run_id = "that of the Redis before"
    assert broken.error_code() == "log_rolled_back"
    assert reader.counters.losses == 1


def test_tokens_behind_an_end_from_outside_count_only_if_they_were_told(scene: Scene) -> None:
    """A step may reach the log while the end that does not know of it is on its way: gateways read it first."""
    scene.scripts["go"] = Script(spell("told"), end=None)
    headers = {"X-Resume-Window": "30"}
    body = {"model": "bytes", "prompt": "go", "stream": True, "stream_options": {"include_usage": True}}
    with scene.gateway.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        request_id = response.headers["x-request-id"]
        scene.gateway.wait_for(lambda: committed(scene) == 4)
        scene.pool.pause()
        time.sleep(0.1)
        scene.pool._drop(request_id, FinishReason.ABORT, 2)
        scene.pool.resume()
        told = parse_sse(response.iter_lines())
    assert told.text() == "told" and told.finish_reasons() == ["abort"]
    cut = next(i for i, event in enumerate(told.events) if event.event_id == "4")
    url = f"/v1/requests/{request_id}/stream"
    with scene.gateway.http.stream("GET", url, headers={"Last-Event-ID": told.events[cut].event_id or ""}) as response:
        assert response.status_code == 200, response.read()
        rest = parse_sse(response.iter_lines())
    assert rest.text() == "" and rest.finish_reasons() == ["abort"]


@pytest.mark.parametrize("same", [True, False], ids=["as before", "otherwise"])
def test_what_redis_lost_is_never_told_twice_or_otherwise(
    open_scene: OpenScene, redis_client: redis.Redis, same: bool
) -> None:
    """AOF everysec: Redis was started anew without its last steps, which the client has. The worker computes them
    again: if they are the same the stream goes on, else it ends with one clear error."""
    scene = open_scene()
    pool, reader = scene.pool, scene.gateway.state.engine.reader
    text = "0123456789"
    scene.scripts["go"] = answer(text, hold_after=6)
    streams = Streams(scene, ["go"]) if same else BrokenStream(scene, "go")
    scene.gateway.wait_for(lambda: committed(scene) == 6)
    pool.pause()
    time.sleep(0.1)
    pool.roll_back(3, answer(text if same else "0123xxxxxx"))
    reader._source._run_id = "that of the Redis before"
    redis_client.client_kill_filter(_type="normal", skipme=True)
    pool.resume()
    if isinstance(streams, BrokenStream):
        assert streams.error_code() == "log_rolled_back"
    else:
        assert streams.texts() == {"go": text}
    assert reader.counters.rebuilds >= 1


def test_another_redis_is_recognised_though_its_log_is_longer(scene: Scene, redis_client: redis.Redis) -> None:
    """What was lost may lie before entries that are newer than this reader's position."""
    reader = scene.gateway.state.engine.reader
    scene.scripts["go"] = answer("0123456789", hold_after=6)
    streams = Streams(scene, ["go"])
    scene.gateway.wait_for(lambda: committed(scene) == 6)
    reader._source._run_id = "that of the Redis before"
    scene.pool.pause()
    time.sleep(0.1)
    redis_client.client_kill_filter(_type="normal", skipme=True)
    scene.gateway.wait_for(lambda: reader.counters.rebuilds == 1)
    scene.pool.resume()
    scene.pool.release()
    assert streams.texts() == {"go": "0123456789"}


def test_one_read_of_the_log_serves_all_streams(scene: Scene, redis_client: redis.Redis) -> None:
    """Case 113."""
    texts = {f"<{i}>": "y" * 50 for i in range(16)}
    for prompt, text in texts.items():
        scene.scripts[prompt] = Script(spell(text), end=EndReason.LENGTH, hold_after=0)
    streams = Streams(scene, list(texts))
    scene.pool.wait_for(lambda: len(scene.pool.submissions) == 16)
    before: Any = redis_client.info("commandstats")
    scene.pool.release()
    assert streams.texts() == texts
    after: Any = redis_client.info("commandstats")
    reads = after["cmdstat_xread"]["calls"] - before["cmdstat_xread"]["calls"]
    published = after["cmdstat_evalsha"]["calls"] - before["cmdstat_evalsha"]["calls"]
    # 800 tokens: reads follow steps (and the pool's own polling), never tokens
    assert published <= 50 + 2 * 16 + 10
    assert reads < 400
