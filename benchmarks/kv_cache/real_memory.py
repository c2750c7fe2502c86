"""From the real engine: how much of the KV cache's memory holds tokens.

They are not reckoned but found. A block is zeroed when it changes hands, so a slot in which a key is not zero holds a
token of the request whose table has the block.
"""

import random
from dataclasses import dataclass, field

from benchmarks.kv_cache.in_process import BLOCK_SIZE, make_engine, seats_of, serve
from benchmarks.kv_cache.simulated import WASTE
from benchmarks.report import Value
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models.model import Model
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.seats import Seat
from shared.messages import StepPlan, Submission
from shared.packing import pack_int32
from shared.sampling import SamplingParams

LOOK_EVERY = 4
"""Steps."""


@dataclass(frozen=True, slots=True)
class Load:
    """A pool and what comes to it."""

    num_blocks: int = 160
    max_model_len: int = 640
    """What a place that is reserved in advance must hold."""
    num_requests: int = 24
    prompt: int = 220
    output: int = 40
    spread: float = 0.5
    """How much shorter and longer prompts and outputs are than those means."""

    def submissions(self, tokens: list[int]) -> list[Submission]:
        """Prompts are pieces of a text."""
        draw = random.Random(1)
        made = []
        for number in range(self.num_requests):
            length, output = (self._draw(draw, mean) for mean in (self.prompt, self.output))
            first = draw.randint(0, len(tokens) - length)
            params = SamplingParams(max_tokens=output, seed=number, ignore_eos=True)
            prompt = pack_int32(tokens[first : first + length])
            made.append(Submission(f"request-{number}", "model", "completion", 0.0, prompt, params))
        return made

    def _draw(self, draw: random.Random, mean: int) -> int:
        return draw.randint(round((1 - self.spread) * mean), round((1 + self.spread) * mean))


@dataclass(slots=True)
class Memory:
    """Sums over the looks at a run."""

    cache: KVCache
    num_looks: int = 0
    num_rows: int = 0
    num_slots: int = 0
    """In block tables."""
    num_tokens: int = 0
    """Found in them."""
    _num_steps: int = 0
    _owners: dict[int, Seat] = field(default_factory=dict)

    def before(self, core: SchedulerCore, plan: StepPlan) -> None:
        owners = {block: seat for seat in seats_of(core) for block in seat.blocks}
        for block, seat in owners.items():
            if self._owners.get(block) is not seat:
                self.cache.data[block].zero_()
        self._owners = owners

    def after(self, core: SchedulerCore) -> None:
        self._num_steps += 1
        if self._owners and self._num_steps % LOOK_EVERY == 0:
            self.num_looks += 1
            self.num_rows += len(seats_of(core))
            self.num_slots += len(self._owners) * self.cache.block_size
            self.num_tokens += tokens_in(self.cache, list(self._owners))


def tokens_in(cache: KVCache, blocks: list[int]) -> int:
    """Slots of these blocks in which the first layer has a key."""
    first_layer = KVCache(cache.data[blocks][:, :1], cache.layout)
    keys = first_layer.read(slice(None))[:, 0, 0]  # [blocks, heads, block_size, head_dim]
    return int((keys != 0).any(-1).any(1).sum())


def measure_real_memory(model: Model, tokens: list[int], load: Load) -> list[dict[str, Value]]:
    """As many requests as the core admits to the worker's pool; and what a place of the longest would hold."""
    engine = make_engine(
        model, num_blocks=load.num_blocks, max_num_seqs=load.num_requests, max_model_len=load.max_model_len
    )
    memory = Memory(engine.cache)
    serve(engine, load.submissions(tokens), memory)
    held = memory.num_tokens / memory.num_rows
    token_mib = engine.cache.bytes_per_block / BLOCK_SIZE / 2**20
    return [
        {
            "memory": "paged",
            "requests at a time": memory.num_rows / memory.num_looks,
            WASTE: 100 * (1 - memory.num_tokens / memory.num_slots),
            "tokens a request": held,
            "MiB a request": token_mib * memory.num_slots / memory.num_rows,
        },
        {
            "memory": f"preallocated, {load.max_model_len} tokens each",
            "requests at a time": float(load.num_blocks * BLOCK_SIZE // load.max_model_len),
            WASTE: 100 * (1 - held / load.max_model_len),
            "tokens a request": held,
            "MiB a request": token_mib * load.max_model_len,
        },
    ]
