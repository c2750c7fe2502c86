"""Every setting of the scheduler. Read once, in `__main__`, and passed down."""

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.scheduler.core.blocks import Reclaim
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.evictable import Eviction
from services.scheduler.core.extents import Fit
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.policies.fair import parse_weights
from shared.errors import ConfigError


def checked_weights(text: str) -> str:
    """The text of `tenant_weights`, if it means something.

    Raises:
        ValueError: it does not.
    """
    try:
        parse_weights(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


class Settings(BaseSettings):
    """Environment variables `PAGEWIRE_<NAME>`. The first block must equal what the workers were started with."""

    model_config = SettingsConfigDict(env_prefix="PAGEWIRE_", extra="ignore")

    redis_url: str = "redis://127.0.0.1:6379/0"
    pool: str = "default"
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens per KV block."""
    max_num_seqs: int = Field(64, ge=1, le=4096)
    """Rows of a worker's batch."""
    max_num_batched_tokens: int = Field(512, ge=1)
    """Token budget of one step: decode rows plus prefill chunks."""
    max_model_len: int = Field(0, ge=0)
    """Longest prompt plus output, in tokens; 0: that of the first worker."""
    plan_ahead: int = Field(2, ge=1, le=2)
    """Plans in flight per worker."""

    # Fields that `SchedulerConfig` has too are handed to it under the same name.
    admission_room: int = Field(4, ge=0)
    """Tokens per running row that find a block even after an admission, so that a newcomer is not preempted at once."""
    itl_target_s: float = Field(0.05, ge=0, allow_inf_nan=False)
    """Prefill beside decode rows makes no step longer than this, in seconds; 0: no bound."""
    policy: PolicyName = PolicyName.FCFS
    """Which waiting request goes next: in order of arrival, by its priority, or of the tenant that was served least."""
    priority_ageing_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Policy `priority`: having come this much earlier outweighs a priority that is worse by 1."""
    tenant_weights: Annotated[str, AfterValidator(checked_weights)] = ""
    """Policy `fair`: shares of tenants, as in `a=2,b=1`; those not named have 1."""
    max_bypasses: int = Field(16, ge=0)
    """Later requests that may be admitted before one that lacks KV blocks; then all wait for it."""
    max_worker_deaths: int = Field(5, ge=0)
    """Workers in a row that may die of one request, as far as can be told, before it ends; 0: any number. The default
    leaves room for those that die for other reasons before a request gets on."""
    enable_prefix_caching: bool = True
    """Requests that begin alike share the KV of what they have in common, also after the first one ended."""
    eviction: Eviction = Eviction.LRU
    """Which cached block goes first when blocks are needed."""
    reclaim: Reclaim = Reclaim.LAZY
    """Whether blocks that no request uses stay cached (lazy) or are freed at once (immediate)."""
    fit: Fit = Fit.FIRST
    """Which run of free blocks a request gets."""
    preemption: Preemption = Preemption.AUTO
    """What becomes of the KV of a preempted request: recompute, swap (to the worker's host pool) or auto."""
    demotion: bool = True
    """Evicted blocks go on in the worker's host pool, if it has one."""

    max_queued_requests: int = Field(4096, ge=0)
    """Queue cap; further requests get 429. 0 = no cap."""
    max_queued_tokens: int = Field(0, ge=0)
    """Queue cap in prompt tokens. 0 = no cap."""
    record_ttl_s: int = Field(3600, ge=1)
    """How long the record of an ended request stays readable."""

    usage_keep_s: float = Field(7 * 86_400.0, ge=0)
    """How long usage records are kept for whoever accounts for them."""

    record: str = ""
    """Folder into which everything that a replay needs is recorded; empty: nothing is."""
    record_file_bytes: int = Field(64 * 1024 * 1024, ge=4096)
    """A recording's file that is larger is followed by the next."""
    record_bytes: int = Field(4 * 1024 * 1024 * 1024, ge=4096)
    """A recording's oldest files go while all are larger together."""

    lease_ttl_s: float = Field(2.0, ge=0.2)
    step_deadline_s: float = Field(10.0, ge=0, allow_inf_nan=False)
    """A step may take this long, and 20 times what its worker's rates promise, then the worker is fenced; 0: never."""
    stall_after_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    """Work without progress is told after this time."""
    snapshot_interval_s: float = Field(0.8, gt=0, le=10)
    fold_interval_s: float = Field(5.0, gt=0, le=60)
    log_keep_s: float = Field(60.0, ge=0)
    """The step log keeps at least this much time …"""
    log_keep_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """… and at least this much payload, before it is trimmed."""

    name: str = "scheduler-0"
    """Stable name of this seat."""
    instance: str = ""
    """Unique per process start; the supervisor gives it, else it is chosen."""
    fault_dir: str = ""
    """Of fault tests only: see `shared/fault_points.py`."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(str.lower)] = "info"

    def core_config(self, max_model_len: int) -> SchedulerConfig:
        """What the core is told.

        Raises:
            ConfigError: values that it cannot work with.
        """
        own = dict(self)
        options = {field.name: own[field.name] for field in fields(SchedulerConfig) if field.name in own}
        return SchedulerConfig(**{**options, "max_model_len": max_model_len})
