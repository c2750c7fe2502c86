"""Time of a decode step and of prefill in one worker engine, without Redis, by kind of work.

    python -m benchmarks.engine_step --model FOLDER [--dtype bfloat16] [--threads 2] [--rows 1 8 32 64]

Prompts are random tokens; every row decodes. Printed are, in milliseconds, the fastest and the median step, the CPU
time of all threads (which other processes on the machine disturb less), and how the median step divides into products with
weights, attention, sampling and everything else.
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


class Stopwatch:
    """Seconds per kind of work. Calls on a CPU are synchronous; on CUDA the kinds are not to be trusted."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[kind] += time.perf_counter() - started

        return timed


@contextmanager
def watched(stopwatch: Stopwatch) -> Iterator[None]:
    """Time attention, sampling and every product while the block runs. Models must be loaded inside it."""

    def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return TimedLinear(pack_linear(weight, bias), stopwatch)

    sample = Sampler.sample
    with (
        patch.object(llama, "paged_attention", stopwatch.wrap("attention", paged_attention)),
        patch.object(llama, "pack_linear", pack),
        patch.object(Sampler, "sample", stopwatch.wrap("sampling", sample)),
    ):
        yield


class TimedLinear:
    """A packed weight whose products are timed."""

    def __init__(self, linear: Linear, stopwatch: Stopwatch) -> None:
        self.name, self.out_features, self.in_features = linear.name, linear.out_features, linear.in_features
        kind = "head" if linear.out_features > 8 * linear.in_features else "gemm"
        self._call = stopwatch.wrap(kind, linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._call(x)
        return product


def measure(engine: Engine, stopwatch: Stopwatch, num_rows: int, args: argparse.Namespace) -> None:
    """Prefill `num_rows` prompts one by one, then decode; print one line each."""
    driver, draw = EngineDriver(engine), random.Random(num_rows)
    params = SamplingParams(
        max_tokens=args.steps + num_rows + 2, seed=1, temperature=args.temperature, top_p=args.top_p, ignore_eos=True
    )
    started = time.perf_counter()
    for row in range(num_rows):
        prompt = [draw.randrange(3, engine.model.config.vocab_size) for _ in range(args.prompt)]
        driver.add(str(row), prompt, params)
    while any(request.pending for request in driver.requests.values()):
        waiting = [r.request_id for r in driver.requests.values() if r.pending]
        driver.step(dict.fromkeys(waiting[: max(1, args.chunk // args.prompt)], args.prompt))
    prefill = time.perf_counter() - started
    lines, cpu = [], []
    for _ in range(args.steps):
        stopwatch.seconds.clear()
        started, cpu_started = time.perf_counter(), time.process_time()
        driver.step()
        cpu.append(time.process_time() - cpu_started)
        lines.append((time.perf_counter() - started, dict(stopwatch.seconds)))
    total = statistics.median(line[0] for line in lines)
    kinds = {kind: statistics.median(line[1].get(kind, 0.0) for line in lines) for kind in KINDS}
    times = f"min {1e3 * min(lines)[0]:7.2f}  median {1e3 * total:7.2f}  cpu {1e3 * statistics.median(cpu):7.2f} ms"
    kinds["rest"] = total - sum(kinds.values())
    parts = "  ".join(f"{kind} {1e3 * seconds:6.2f}" for kind, seconds in kinds.items())
    print(
        f"rows {num_rows:3d}: {times}   {parts}   "
        f"{num_rows / total:6.0f} tokens/s decode, {num_rows * args.prompt / prefill:6.0f} tokens/s prefill"
    )


KINDS = ("gemm", "head", "attention", "sampling")


def main() -> None:
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
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    stopwatch = Stopwatch()
    with watched(stopwatch):
        folder = args.model or resolve(DEFAULT_MODEL, DEFAULT_HOME).require_folder()
        model = load_model(folder, dtype=args.dtype, device=args.device)
        num_blocks = -(-(args.prompt + args.steps + max(args.rows) + 2) // BLOCK_SIZE) * max(args.rows)
        cache = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, model.dtype, model.device)
        engine = Engine(model, cache, EngineConfig(max(args.rows), MAX_LENGTH, args.chunk))
        engine.warm_up()
        print(f"{model.fingerprint}, {args.threads} threads, prompts of {args.prompt} tokens, {args.steps} steps")
        for num_rows in args.rows:
            measure(engine, stopwatch, num_rows, args)


if __name__ == "__main__":
    main()
