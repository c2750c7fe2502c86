"""Who goes first: one object per pool, chosen by option. `base.py` says what a policy is asked and told."""

from typing import TYPE_CHECKING

from services.scheduler.core.policies.base import Policy, PolicyName
from services.scheduler.core.policies.fair import Fair, parse_weights
from services.scheduler.core.policies.fcfs import Fcfs
from services.scheduler.core.policies.priority import Priority

if TYPE_CHECKING:
    from services.scheduler.core.config import SchedulerConfig


def make_policy(config: "SchedulerConfig") -> Policy:
    """The policy of a pool, as new."""
    if config.policy == PolicyName.PRIORITY:
        return Priority(config.priority_ageing_s)
    if config.policy == PolicyName.FAIR:
        return Fair(parse_weights(config.tenant_weights))
    return Fcfs()
