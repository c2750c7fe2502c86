"""What the core can be told from outside."""

from dataclasses import dataclass
from math import isfinite

from services.scheduler.core.blocks import BlockPool, Reclaim
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.evictable import Eviction
from services.scheduler.core.extents import Fit
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.policies.fair import parse_weights
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one pool. All counts are per worker.

    Raises:
        ConfigError: a value the scheduler cannot work with.
    """

    max_model_len: int
    """Most tokens of one request, prompt and output together."""
    block_size: int = 16
    """Tokens per KV block."""
    max_num_seqs: int = 128
    """Rows of a worker's batch."""
    max_num_batched_tokens: int = 512
    """Tokens that one forward pass computes: one per decode row, the rest for prefill chunks."""
    plan_ahead: int = 2
    """Plans in flight per worker. With 2 the next plan lies at the worker when a step ends."""
    admission_room: int = 4
    """Tokens per running row that find a block even after an admission, so that a newcomer is not preempted at once."""
    itl_target_s: float = 0.0
    """Most seconds that a step takes by prefill beside decode rows, by the worker's own rates; 0: no bound."""
    policy: PolicyName = PolicyName.FCFS
    """Which waiting request goes next."""
    priority_ageing_s: float = 60.0
    """Policy `priority`: having come this many seconds earlier outweighs a priority that is worse by 1."""
    tenant_weights: str = ""
    """Policy `fair`: shares of tenants, as in `a=2,b=1`; those not named have 1."""
    max_bypasses: int = 16
    """Later requests that may be admitted before one that lacks blocks."""
    max_worker_deaths: int = 0
    """Workers in a row that may die of one request, as far as can be told, before it ends; 0: any number."""
    enable_prefix_caching: bool = True
    """Full blocks stay findable, so that a request that begins alike does not compute them again."""
    eviction: Eviction = Eviction.LRU
    """Which cached block goes first."""
    reclaim: Reclaim = Reclaim.LAZY
    """Whether cached blocks outlive the tables that refer to them."""
    fit: Fit = Fit.FIRST
    """Which run of free blocks a table gets."""
    preemption: Preemption = Preemption.AUTO
    """What becomes of the KV of a request that gives up its blocks."""
    demotion: bool = True
    """Whether evicted blocks go on in the host pool, if the worker has one."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.plan_ahead not in (1, 2):
            raise ConfigError(f"plan_ahead must be 1 or 2, not {self.plan_ahead}")
        if self.admission_room < 0:
            raise ConfigError(f"admission_room must not be negative, but is {self.admission_room}")
        if not (isfinite(self.priority_ageing_s) and self.priority_ageing_s > 0):
            raise ConfigError(f"priority_ageing_s must be positive, not {self.priority_ageing_s}")
        if self.max_bypasses < 0:
            raise ConfigError(f"max_bypasses must not be negative, but is {self.max_bypasses}")
        if self.max_worker_deaths < 0:
            raise ConfigError(f"max_worker_deaths must not be negative, but is {self.max_worker_deaths}")
        parse_weights(self.tenant_weights)
        if not (isfinite(self.itl_target_s) and self.itl_target_s >= 0):
            raise ConfigError(f"itl_target_s must be 0 or a time in seconds, not {self.itl_target_s}")

    @property
    def max_rows(self) -> int:
        """Rows in use at once. Every decode row is in every pass, so they are no more than its token budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def make_pool(self, num_blocks: int, num_cpu_blocks: int = 0) -> BlockPool:
        """The empty pool of a worker."""
        return BlockPool(
            num_blocks,
            fit=self.fit,
            eviction=self.eviction,
            reclaim=self.reclaim,
            num_cpu_blocks=num_cpu_blocks,
            demotion=self.demotion,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def room(self, num_rows: int) -> int:
        """Blocks that an admission leaves free beside `num_rows` running rows."""
        return num_rows * self.admission_room // self.block_size
