"""Time of a decode step and of prefill in one worker engine, without Redis, by kind of work.

    python -m benchmarks.engine_step --model FOLDER [--dtype bfloat16] [--threads 2] [--rows 1 8 32 64]

Prompts are random tokens; every row decodes. A step is a fixed sequence of calls (products with weights, attention,
sampling) and of what lies between them. Printed are the median step and the quiet one: the sum of the fastest time of
each piece over all steps, which is what an idle machine would need even if this one is not idle.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kernels.linear.api import Linear, pack_linear
from kernels.paged_attention.api import paged_attention
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models import llama
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.sampling.sampler import Sampler
from shared.model_store import DEFAULT_HOME, DEFAULT_MODEL, resolve
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver

BLOCK_SIZE = 16
MAX_LENGTH = 2048
KINDS = ("gemm", "head", "attention", "sampling", "rest")


class Recorder:
    """The pieces of a step in order: (kind, seconds). On CUDA, where calls return early, only totals mean something."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, float]] = []
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self.pieces = []
        self._last = time.perf_counter()

    def mark(self, kind: str) -> None:
        """Whatever ran since the last mark was of this kind."""
        now = time.perf_counter()
        self.pieces.append((kind, now - self._last))
        self._last = now

    def wrap(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, recorded as a piece."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.mark("rest")
            try:
                return call(*args, **kwargs)
            finally:
                self.mark(kind)

        return recorded


class RecordedLinear:
    """A packed weight whose products are recorded."""

    def __init__(self, linear: Linear, recorder: Recorder) -> None:
        self.name, self.out_features, self.in_features = linear.name, linear.out_features, linear.in_features
        is_head = linear.out_features > 8 * linear.in_features
        self._call = recorder.wrap("head" if is_head else "gemm", linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._call(x)
        return product


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Record attention, sampling and every product while the block runs. Models must be loaded inside it."""

    def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return RecordedLinear(pack_linear(weight, bias), recorder)

    sample = Sampler.sample
    with (
        patch.object(llama, "paged_attention", recorder.wrap("attention", paged_attention)),
        patch.object(llama, "pack_linear", pack),
        patch.object(Sampler, "sample", recorder.wrap("sampling", sample)),
    ):
        yield


def prefill(driver: EngineDriver, num_rows: int, args: argparse.Namespace) -> float:
    """Seconds to prefill `num_rows` random prompts, as many per step as fit the chunk."""
    draw = random.Random(num_rows)
    params = SamplingParams(
        max_tokens=args.steps + num_rows + 2, seed=1, temperature=args.temperature, top_p=args.top_p, ignore_eos=True
    )
    for row in range(num_rows):
        prompt = [draw.randrange(3, driver.engine.model.config.vocab_size) for _ in range(args.prompt)]
        driver.add(str(row), prompt, params)
    per_step = max(1, args.chunk // args.prompt)
    started = time.perf_counter()
    while waiting := [request.request_id for request in driver.requests.values() if request.pending]:
        driver.step(dict.fromkeys(waiting[:per_step], args.prompt))
    return time.perf_counter() - started


def measure(engine: Engine, recorder: Recorder, num_rows: int, args: argparse.Namespace) -> None:
    """Prefill, then decode; print one line."""
    driver = EngineDriver(engine)
    seconds = prefill(driver, num_rows, args)
    steps = []
    for _ in range(args.steps):
        recorder.start()
        driver.step()
        recorder.mark("rest")
        steps.append(recorder.pieces)
    median = statistics.median(sum(piece[1] for piece in pieces) for pieces in steps)
    quiet: dict[str, float] = defaultdict(float)
    for same in zip(*steps, strict=True):
        quiet[same[0][0]] += min(piece[1] for piece in same)
    total = sum(quiet.values())
    parts = "  ".join(f"{kind} {1e3 * quiet[kind]:6.2f}" for kind in KINDS)
    print(
        f"rows {num_rows:3d}: median {1e3 * median:7.2f}  quiet {1e3 * total:7.2f} ms = {parts}   "
        f"{num_rows / median:5.0f} ({num_rows / total:5.0f} quiet) tokens/s; "
        f"prefill {num_rows * args.prompt / seconds:5.0f} tokens/s",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="model folder; the default model if absent")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=105)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    recorder = Recorder()
    with recorded(recorder):
        folder = args.model or resolve(DEFAULT_MODEL, DEFAULT_HOME).require_folder()
        model = load_model(folder, dtype=args.dtype, device=args.device)
        num_blocks = -(-(args.prompt + args.steps + max(args.rows) + 2) // BLOCK_SIZE) * max(args.rows)
        cache = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, model.dtype, model.device)
        engine = Engine(model, cache, EngineConfig(max(args.rows), MAX_LENGTH, args.chunk))
        engine.warm_up()
        print(f"{model.fingerprint}, {args.threads} threads, prompts of {args.prompt} tokens, {args.steps} steps")
        for num_rows in args.rows:
            measure(engine, recorder, num_rows, args)


if __name__ == "__main__":
    main()
