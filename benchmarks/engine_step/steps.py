"""Time of a decode step and of prefill in one engine, without scheduler and Redis, by part of the step.

Prompts are random tokens; every row decodes. The median step says what this machine took, the quiet one, the sum of the
fastest time of each part over all steps, what it would need if it were idle.
"""

import random
import statistics
import time
from dataclasses import dataclass

from benchmarks.report import Value
from services.gpu_worker.engine import Engine
from services.gpu_worker.profile import Part
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver

PARTS = (Part.INPUT_BUILD, Part.ATTENTION, Part.GEMM, Part.SAMPLING)


@dataclass(frozen=True, slots=True)
class Steps:
    """What is measured."""

    prompt: int = 105
    """Tokens of each prompt."""
    steps: int = 30
    chunk: int = 512
    """Tokens of a prefill step."""
    temperature: float = 0.0
    top_p: float = 1.0


def measure_steps(engine: Engine, num_rows: int, options: Steps) -> dict[str, Value]:
    """Prefill, then decode; a row of a table, times in ms."""
    driver = EngineDriver(engine)
    prefill_s = _prefill(driver, num_rows, options)
    taken: dict[Part, list[float]] = {part: [] for part in (*PARTS, Part.STEP)}
    for _ in range(options.steps):
        before = engine.profile.totals()
        driver.step()
        after = engine.profile.totals()
        for part, seconds in taken.items():
            seconds.append(after[part] - before[part])
    median = statistics.median(taken[Part.STEP])
    rest = [step - sum(parts) for step, *parts in zip(taken[Part.STEP], *(taken[p] for p in PARTS), strict=True)]
    quiet = sum(min(taken[part]) for part in PARTS) + min(rest)
    return {
        "rows": float(num_rows),
        "median ms": 1e3 * median,
        "quiet ms": 1e3 * quiet,
        **{f"{part} ms": 1e3 * statistics.median(taken[part]) for part in PARTS},
        "tokens/s": num_rows / median,
        "prefill tokens/s": num_rows * options.prompt / prefill_s,
    }


def _prefill(driver: EngineDriver, num_rows: int, options: Steps) -> float:
    """Seconds to prefill `num_rows` random prompts, as many per step as fit the chunk."""
    draw = random.Random(num_rows)
    vocab_size = driver.engine.model.config.vocab_size
    params = SamplingParams(
        max_tokens=options.steps + num_rows + 2,
        seed=1,
        temperature=options.temperature,
        top_p=options.top_p,
        ignore_eos=True,
    )
    for row in range(num_rows):
        driver.add(str(row), [draw.randrange(3, vocab_size) for _ in range(options.prompt)], params)
    per_step = max(1, options.chunk // options.prompt)
    started = time.perf_counter()
    while waiting := [request.request_id for request in driver.requests.values() if request.pending]:
        driver.step(dict.fromkeys(waiting[:per_step], options.prompt))
    return time.perf_counter() - started
