"""The client whose streams outlive gateways, against real ones."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.ports import free_port
from services.cli.resuming import MOST_FAULTS, ResumingStream, ServerError
from services.gateway.text.tokenizer import TextTokenizer
from shared.keys import Keys
from shared.messages import Abort
from tests.fakes.byte_model import answer, spell, write_byte_model
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.scripted_pool import Script, ScriptedPool
from tests.integration.gateway.test_process import gateway_process, wait_ready

TEXT = "Grüße, 世界! " * 8
BODY = {"prompt": "go", "max_tokens": 400, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def pool(redis_url: str, keys: Keys) -> Iterator[ScriptedPool]:
    with ScriptedPool(redis_url, keys, lambda _: answer(TEXT, hold_after=60), step_s=0.01) as pool:
        yield pool


def text_of(chunks: list[dict]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_a_stream_outlives_its_gateway(pool: ScriptedPool, model: Path, redis_url: str) -> None:
    with gateway_process(model, redis_url) as (first, url), gateway_process(model, redis_url) as (_, other):
        wait_ready(url)
        wait_ready(other)
        stream = ResumingStream([url, other], "/v1/completions", BODY)
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 5:
                first.send_signal(signal.SIGKILL)
                first.wait()
                pool.release()
    assert stream.num_resumed >= 1
    assert text_of(chunks) == TEXT
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    assert [c["usage"]["completion_tokens"] for c in chunks if c["usage"]] == [len(spell(TEXT)) + 1]
    assert pool.messages(Abort) == [] and len(pool.submissions) == 1


def test_a_fault_of_the_gateway_is_passed_over(pool: ScriptedPool, model: Path, redis_url: str) -> None:
    with RunningGateway(TextTokenizer.from_folder(model), model=model, redis_url=redis_url) as gateway:
        stream = ResumingStream(gateway.wait_ready().url, "/v1/completions", BODY)
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 5:
                fail = gateway.state.engine.reader.fail_all
                gateway.loop.call_soon_threadsafe(fail, "internal_error", "this gateway failed")
                pool.release()
    assert stream.num_resumed == 1 and text_of(chunks) == TEXT
    assert pool.messages(Abort) == []


def test_a_fault_that_comes_back_is_told(pool: ScriptedPool, model: Path, redis_url: str) -> None:
    """A search without results is an internal error at every gateway."""
    pool.release()
    body = {"prompt": "go", "use_beam_search": True, "n": 2}
    with RunningGateway(TextTokenizer.from_folder(model), model=model, redis_url=redis_url) as gateway:
        stream = ResumingStream(gateway.wait_ready().url, "/v1/completions", body)
        with pytest.raises(ServerError, match="internal error"):
            list(stream)
    assert stream.num_resumed == MOST_FAULTS


def test_it_waits_for_the_one_address_to_come_back(pool: ScriptedPool, model: Path, redis_url: str) -> None:
    port = str(free_port())
    chunks, stream = [], ResumingStream(f"http://127.0.0.1:{port}", "/v1/completions", BODY)
    with gateway_process(model, redis_url, port=port) as (first, url):
        wait_ready(url)
        iterator = iter(stream)
        chunks.append(next(iterator))
        first.kill()
        first.wait()
    pool.release()
    with gateway_process(model, redis_url, port=port) as (_, url):
        chunks.extend(iterator)
    assert text_of(chunks) == TEXT and stream.num_resumed >= 1


def test_a_gateway_that_dies_with_the_post_in_its_hands(pool: ScriptedPool, model: Path, redis_url: str) -> None:
    """Nothing of the answer has come, so the request is sent again, under the same key."""
    pool.release()
    port = str(free_port())
    chunks: list[dict] = []
    with gateway_process(model, redis_url, port=port) as (first, url):
        wait_ready(url)
        stream = ResumingStream(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]})
        thread = threading.Thread(target=lambda: chunks.extend(stream))
        first.send_signal(signal.SIGSTOP)  # the request waits in the socket
        thread.start()
        time.sleep(0.3)
        first.kill()
        first.wait()
    with gateway_process(model, redis_url, port=port):
        thread.join(30)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == TEXT
    assert len(pool.submissions) == 1


def test_closing_ends_the_request(pool: ScriptedPool, model: Path, redis_url: str) -> None:
    pool.script = lambda _: Script(spell(TEXT), end=None)
    with gateway_process(model, redis_url) as (_, url):
        wait_ready(url)
        iterator = iter(ResumingStream(url, "/v1/completions", BODY))
        next(iterator)
        iterator.close()
        (abort,) = pool.wait_for(lambda: pool.messages(Abort))
        assert abort.cause == "cancelled"


def test_refusals_are_told_at_once(pool: ScriptedPool, model: Path, redis_url: str) -> None:
    with gateway_process(model, redis_url) as (_, url):
        wait_ready(url)
        with pytest.raises(ServerError, match="HTTP 400: max_tokens"):
            list(ResumingStream(url, "/v1/completions", {"prompt": "go", "max_tokens": -1}))
    with pytest.raises(ServerError):
        list(ResumingStream(url, "/v1/completions", BODY))
