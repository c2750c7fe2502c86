"""What a tick writes: one atomic commit per tick, all commits of a turn in one pipeline."""

from collections.abc import Sequence

import redis

from services.scheduler.core.ticks import TickOutcome
from shared.channel import Channel, Command
from shared.errors import Fenced, PagewireError
from shared.fault_points import FaultPoint, pass_point
from shared.keys import Keys
from shared.messages import Tick, TickEntry, encode
from shared.records import LIVE_TTL_S, final_fields
from shared.scripts import AppendStatus, Operation, SetFields, TickCommit, XAdd, commit_ticks


def tick_operations(keys: Keys, tick: Tick, outcome: TickOutcome, *, record_ttl_s: int) -> list[Operation]:
    """All that `tick` led to: the plan that carries it or its own entry, request events, final and usage records."""
    operations: list[Operation] = []
    planned = outcome.plan
    if planned is not None:
        # First, because it alone can be refused (its entry id is given): a script does not take back what it has done.
        stream, plan = keys.plans(planned.worker, planned.incarnation), planned.plan
        ttl_s = LIVE_TTL_S if plan.plan_id == 1 else 0  # it makes the stream, which holds prompts
        operations.append(XAdd(stream, encode(plan), f"{plan.plan_id}-0", ttl_s))
    if planned is None or outcome.events or outcome.cached:
        entry = TickEntry(tick=tick if planned is None else None, events=outcome.events, cached=outcome.cached)
        operations.append(XAdd(keys.steps, encode(entry)))
    for ended in outcome.finished:
        fields = final_fields(ended.output, tick.log_id, ended.final, ended.logprobs)
        operations.append(SetFields(keys.request(ended.request_id), fields, record_ttl_s))
        operations.append(XAdd(keys.usage, encode(ended.usage(tick.now))))
    return operations


class PlanRefused(PagewireError):
    """Somebody else wrote into a plan stream, and no plan can follow that entry: the same plan is refused for ever."""


class Committer:
    """Commits ticks under one epoch. A commit whose outcome is unknown stays pending and is repeated until answered."""

    def __init__(self, channel: Channel, keys: Keys, *, epoch: int) -> None:
        self._channel = channel
        self._keys = keys
        self._epoch = epoch
        self._pending: list[TickCommit] = []

    def add(self, tick: int, operations: Sequence[Operation]) -> None:
        """Commit `tick` at the next `flush`."""
        self._pending.append(TickCommit(self._epoch, tick, tuple(operations)))

    def flush(self, then: Sequence[Command] = ()) -> None:
        """Commit what is pending, in order. If something is, `then` is sent with it, and its reply left unread.

        Raises:
            Fenced: another leader commits; nothing of this one counts any more.
            PlanRefused: nothing of the tick was committed, and nothing will be.
            RedisFailure: the outcome is unknown; call again.
        """
        if not self._pending:
            return
        pass_point(FaultPoint.TICK_DECIDED)
        try:
            statuses = commit_ticks(self._channel, self._keys, self._pending, then)
        except redis.ResponseError as error:
            if "The ID specified in XADD" in str(error):
                raise PlanRefused(str(error)) from error
            raise
        pass_point(FaultPoint.TICK_COMMITTED)
        if AppendStatus.STALE in statuses:
            raise Fenced(f"epoch {self._epoch} is stale")
        self._pending.clear()
