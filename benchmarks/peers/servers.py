"""Pagewire and its peers, each served by itself on this machine: an OpenAI-compatible URL while the block runs."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.cli.ports import free_port
from services.cli.settings import Settings
from tests.harness.stack import running_stack

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
MODEL = "smollm2"
"""What the peers call the default model."""
MAX_LENGTH = 2048
LLAMA_SLOTS = 64
VLLM_CACHE_GIB = 2


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers."""

    url: str
    model: str


class NotThere(Exception):
    """The server cannot be started here; the text says what is missing."""


Serve = Callable[[], AbstractContextManager[Served]]


@dataclass(frozen=True, slots=True)
class Contender:
    """One server with one kind of weights."""

    name: str
    bits: float
    """Of a weight, scales included."""
    is_integer: bool
    """Whether it multiplies 8-bit integers."""
    serve: Serve


def contenders(peers: Path, home: Path, model: Path) -> list[Contender]:
    """All of them, in the order in which a round runs them.

    Args:
        peers: where setup.sh put the peers.
        home: Pagewire's cache.
        model: the default model's folder.
    """
    return [
        Contender("pagewire bf16", 16, False, lambda: pagewire(home)),
        Contender("pagewire int8", 8, True, lambda: pagewire(home, quantization="int8")),
        Contender("pagewire Q4_0", 4.5, True, lambda: pagewire_gguf(peers, home, "Q4_0")),
        Contender("vllm bf16", 16, False, lambda: vllm(peers, model)),
        Contender("llama BF16", 16, False, lambda: llama(peers, "BF16")),
        Contender("llama Q8_0", 8.5, True, lambda: llama(peers, "Q8_0")),
        Contender("llama Q4_0", 4.5, True, lambda: llama(peers, "Q4_0")),
    ]


@contextmanager
def pagewire(home: Path, **options: str) -> Iterator[Served]:
    """`pagewire up` with its defaults and `options`; the default model's weights are bf16.

    Raises:
        NotThere: it has no such option.
    """
    if unknown := options.keys() - Settings.model_fields.keys():
        raise NotThere(f"pagewire has no option --{sorted(unknown)[0]} yet")
    with tempfile.TemporaryDirectory() as folder, running_stack(Path(folder), free_port(), home, **options) as stack:
        yield Served(stack.url, stack.model)


def pagewire_gguf(peers: Path, home: Path, kind: str) -> AbstractContextManager[Served]:
    """The same over the file that llama-server is given, in its blocks."""
    return pagewire(home, quantization="gguf", model=str(gguf_of(peers, kind)))


def gguf_of(peers: Path, kind: str) -> Path:
    """The default model in one type of GGUF.

    Raises:
        NotThere: setup.sh did not make it.
    """
    path = peers / "gguf" / f"{kind}.gguf"
    require(path, "llama")
    return path


def vllm(peers: Path, model: Path) -> AbstractContextManager[Served]:
    """vLLM on all cores; as it comes it would keep one for its server."""
    python = peers / "vllm" / "bin" / "python"
    require(python, "vllm")
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "LD_PRELOAD": str(peers / "vllm" / "lib" / "libiomp5.so"),
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", str(MAX_LENGTH)]
    return child(command, environment)


def llama(peers: Path, kind: str) -> AbstractContextManager[Served]:
    """llama-server with one slot for each stream."""
    server = peers / "llama" / "bin" / "llama-server"
    require(server, "llama")
    weights = gguf_of(peers, kind)
    command = [str(server), "--model", str(weights), "--alias", MODEL, "--threads", str(len(os.sched_getaffinity(0)))]
    command += ["--ctx-size", str(LLAMA_SLOTS * 512), "--parallel", str(LLAMA_SLOTS), "--ubatch-size", "512"]
    return child(command, {})


def require(path: Path, peer: str) -> None:
    """Raise `NotThere` if `path`, which setup.sh makes, is not there."""
    if not path.exists():
        raise NotThere(f"{path} is missing: run benchmarks/peers/setup.sh {peer}")


@contextmanager
def child(command: list[str], environment: dict[str, str]) -> Iterator[Served]:
    """`command --port …` until the block ends; its output is shown only if it does not start.

    Raises:
        NotThere: it ended, or did not answer in time.
    """
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            if not _answers(process, f"http://127.0.0.1:{port}/health"):
                log.seek(0)
                raise NotThere(f"{command[0]} does not start:\n{log.read()[-2000:].decode(errors='replace')}")
            yield Served(f"http://127.0.0.1:{port}", MODEL)
        finally:
            stop(process)


def _answers(process: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=2.0).status_code == httpx.codes.OK:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return False


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End the process and the group that it leads: the next one has the machine to itself."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
