"""A gateway before a scripted pool, over a real Redis."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from services.gateway.text.tokenizer import TextTokenizer
from shared.keys import Keys
from shared.messages import Submission
from tests.fakes.byte_model import answer, write_byte_model
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.scripted_pool import Script, ScriptedPool
from tests.fakes.sse_reader import SseStream, parse_sse


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def byte_tokenizer(byte_model: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(byte_model)


Scripts = dict[str, Script | list[Script]]


@dataclass
class Scene:
    """A gateway and its pool. `scripts`: prompt text → what happens, to each choice if it is a list; by default the
    prompt is answered by itself."""

    gateway: RunningGateway
    pool: ScriptedPool
    scripts: Scripts = field(default_factory=dict)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.gateway.http.post(path, json=body)

    def text_of(self, prompt: str) -> str:
        """The whole completion of a prompt."""
        text: str = self.post("/v1/completions", model="bytes", prompt=prompt).json()["choices"][0]["text"]
        return text

    def stream(self, path: str, **body: Any) -> SseStream:
        """A whole stream, which must end in `[DONE]`."""
        with self.gateway.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            stream = parse_sse(answer.iter_lines())
        assert stream.is_done
        return stream

    def broken_stream(self, path: str, **body: Any) -> SseStream:
        """A stream that is cut: it must not look complete."""
        lines: list[str] = []
        with self.gateway.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            with pytest.raises(httpx.RemoteProtocolError):
                lines.extend(answer.iter_lines())
        return parse_sse(lines)


class OpenScene(Protocol):
    """Starts pool and gateway; arguments with the prefix `pool_` go to the pool, others are gateway settings."""

    def __call__(self, **options: Any) -> Scene: ...


@pytest.fixture
def open_scene(redis_url: str, keys: Keys, byte_model: Path, byte_tokenizer: TextTokenizer) -> Iterator[OpenScene]:
    with ExitStack() as stack:

        def start(**options: Any) -> Scene:
            scripts: Scripts = {}
            pool_options = {k[5:]: v for k, v in options.items() if k.startswith("pool_")}
            settings = {k: v for k, v in options.items() if not k.startswith("pool_")}
            pool = stack.enter_context(ScriptedPool(redis_url, keys, _by_prompt(scripts), **pool_options))
            gateway = RunningGateway(byte_tokenizer, model=byte_model, redis_url=redis_url, **settings)
            stack.enter_context(gateway)
            return Scene(gateway.wait_ready(), pool, scripts)

        yield start


@pytest.fixture
def scene(open_scene: OpenScene) -> Scene:
    return open_scene()


def _by_prompt(scripts: Scripts) -> Callable[[Submission], Script]:
    def choose(submission: Submission) -> Script:
        prompt = bytes(b for b in submission.prompt_tokens[::4] if b < 256).decode(errors="replace")
        script = next((s for name, s in scripts.items() if name in prompt), answer("OK: " + prompt))
        return script[submission.params.choice] if isinstance(script, list) else script

    return choose
