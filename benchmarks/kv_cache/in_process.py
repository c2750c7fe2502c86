"""The real core plans for the worker's real engine, in one process: what happens to the blocks of its KV cache."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from services.gpu_worker.cache.kv_cache import KVCache, cache_dtype
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.model import Model
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.seats import Seat
from shared.messages import StepPlan, Submission, WorkerJoined

BLOCK_SIZE = 16
CHUNK = 512
"""Tokens of a step."""


class Watch(Protocol):
    """Looks on."""

    def before(self, core: SchedulerCore, plan: StepPlan) -> None:
        """The plan is made, its blocks are in tables."""

    def after(self, core: SchedulerCore) -> None:
        """The engine has carried it out; the core does not know the result yet."""


def served_dtype(model: Model) -> torch.dtype:
    """What a worker's KV cache of the model holds by default."""
    return cache_dtype(model.stored_dtype, model.dtype, model.config, BLOCK_SIZE, model.device)


def make_engine(model: Model, *, num_blocks: int, max_num_seqs: int, max_model_len: int) -> Engine:
    """As the worker makes it."""
    cache = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, served_dtype(model), model.device)
    return Engine(model, cache, EngineConfig(max_num_seqs, max_model_len, CHUNK))


def serve(engine: Engine, submissions: Sequence[Submission], watch: Watch) -> None:
    """All of them to their ends, with one plan in flight and without the prefix cache."""
    config = SchedulerConfig(
        max_model_len=engine.config.max_model_len,
        block_size=engine.cache.block_size,
        max_num_seqs=engine.config.max_num_seqs,
        max_num_batched_tokens=CHUNK,
        plan_ahead=1,
        enable_prefix_caching=False,
    )
    core = SchedulerCore(config)
    engine.begin("worker-0", 1)
    core.on_worker_joined(WorkerJoined("worker-0", 1, engine.cache.num_blocks))
    for submission in submissions:
        core.add_request(submission)
    plans: deque[StepPlan] = deque()
    while True:
        while (scheduled := core.schedule(0.0)) is not None:
            plans.append(scheduled.plan)
        if not plans:
            break
        watch.before(core, plans[0])
        result = engine.step(plans.popleft())
        watch.after(core)
        core.update_from_result(result)
    assert core.is_idle and not core.broken_workers(), "not everything was served"


def seats_of(core: SchedulerCore) -> list[Seat]:
    """Of all running requests."""
    return [seat for lane in core.lanes.values() for seat in lane.seats.values()]
