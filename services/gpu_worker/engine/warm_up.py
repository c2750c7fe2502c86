"""Plans that touch every code path before the first client does."""

from collections.abc import Iterator

from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine.config import EngineConfig
from shared.messages import NewRow, StepPlan, Tick
from shared.packing import pack_int32
from shared.sampling import SamplingParams

_CPU_PREFILL_TOKENS = 64
"""A CPU has nothing to compile or capture: a short prefill pages the weights in."""
_DECODE_STEPS = 4
_SAMPLED = SamplingParams(max_tokens=_DECODE_STEPS + 2, seed=0, ignore_eos=True, top_p=0.9, repetition_penalty=1.1)
_GREEDY = SamplingParams(max_tokens=_DECODE_STEPS + 2, seed=0, ignore_eos=True, temperature=0.0)
_TICK = Tick(0, "0-0", "0-0", 0.0)


def warm_up_plans(config: EngineConfig, cache: KVCache, *, on_cpu: bool) -> Iterator[StepPlan]:
    """Prefill at the largest size, in two chunks; then decode with every row, and with one.

    All rows share the same blocks: what they compute is of no interest. A cache too small for this is not warmed up.
    """
    room = min(config.max_model_len, cache.num_blocks * cache.block_size)
    size = min(config.max_num_batched_tokens, room - _DECODE_STEPS, _CPU_PREFILL_TOKENS if on_cpu else room)
    if size < 2:
        return
    first = size // 2
    yield _start(1, [(0, size, _SAMPLED)], ((0, first),), cache.block_size)
    yield StepPlan(2, _TICK, chunks=((0, size - first),))
    others = range(1, config.max_num_seqs)
    yield _start(3, [(row, 1, _GREEDY) for row in others], tuple((row, 1) for row in others), cache.block_size)
    yield StepPlan(4, _TICK)
    yield StepPlan(5, _TICK, dropped=tuple(others))


def _start(
    plan_id: int, rows: list[tuple[int, int, SamplingParams]], chunks: tuple[tuple[int, int], ...], block_size: int
) -> StepPlan:
    """Prompts of given sizes in (row, size, params), with blocks for all steps of the warm-up."""
    pairs: list[int] = []
    for row, size, _ in rows:
        for block in range(-(-(size + _DECODE_STEPS) // block_size)):
            pairs += (row, block)
    return StepPlan(
        plan_id,
        _TICK,
        added=tuple(NewRow(row, "warm-up", pack_int32([0] * size), size, 0, params) for row, size, params in rows),
        blocks=pack_int32(pairs),
        chunks=chunks,
    )
