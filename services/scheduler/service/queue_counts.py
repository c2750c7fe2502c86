"""The queue's counters in `limits`, by which the script `submit` refuses early.

submitted (script) − left (leader) = queued: submissions in intake, and requests that were never scheduled
"""

import redis

from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service.inbox import decode_intake
from services.scheduler.service.position import Position
from services.scheduler.service.submissions import load_submissions
from services.scheduler.settings import Settings
from shared.errors import ProtocolError
from shared.keys import Keys
from shared.limits import write_limits
from shared.messages import FIELD, IntakeMessage, Submit


class LimitsWriter:
    """Writes `limits` when something in it changed. `base`: who left the queue before this core began to count."""

    def __init__(self, keys: Keys, settings: Settings, *, base_requests: int, base_tokens: int) -> None:
        self._keys = keys
        self._settings = settings
        self._base_requests = base_requests
        self._base_tokens = base_tokens
        self._written: dict[str, int] = {}

    def count_lost(self, num_requests: int) -> None:
        """Submissions that could not be read will never leave the queue otherwise."""
        self._base_requests += num_requests

    def write(self, client: redis.Redis, core: SchedulerCore) -> None:
        """
        Raises:
            RedisFailure: Redis did not answer; the next call writes.
        """
        values = {
            "left": self._base_requests + core.counters.left_requests,
            "left_tokens": self._base_tokens + core.counters.left_tokens,
            "cap_requests": self._settings.max_queued_requests,
            "cap_tokens": self._settings.max_queued_tokens,
            "max_request_tokens": core.largest_request_tokens() if core.known_workers else 0,
            "max_model_len": core.config.max_model_len,
            "max_rows": core.config.max_rows,
            "max_blocks": core.largest_worker_blocks(),
            "block_size": core.config.block_size,
        }
        if values != self._written:
            write_limits(client, self._keys, **values)
            self._written = values


def queue_base(client: redis.Redis, keys: Keys, position: Position) -> tuple[int, int]:
    """(requests, prompt tokens) that left the queue before the core at `position` began to count.

    Whoever was submitted and waits neither in intake nor in the core's queue has left.

    Raises:
        RedisFailure: Redis did not answer.
    """
    core = position.core
    with client.pipeline() as pipe:  # both at one moment
        pipe.hmget(keys.limits, "submitted", "submitted_tokens")
        pipe.xrange(keys.intake, min=f"({position.intake_id}")
        submitted, entries = pipe.execute()
    arriving = _arriving([fields.get(FIELD, b"") for _, fields in entries], core)
    found = load_submissions(client, keys, arriving)
    queued = [request.num_prompt_tokens for request in core.requests.values() if not request.has_left_queue]
    queued += [len(submission.prompt_tokens) // 4 for submission in found.values()]
    # Those whose record is unreadable are counted when intake is applied.
    left = int(submitted[0] or 0) - len(queued) - (len({m.request_id for m in arriving}) - len(found))
    left_tokens = int(submitted[1] or 0) - sum(queued)
    return left - core.counters.left_requests, left_tokens - core.counters.left_tokens


def _arriving(payloads: list[bytes], core: SchedulerCore) -> list[Submit]:
    """Submissions in intake that the core does not know yet."""
    found = []
    for payload in payloads:
        try:
            message: IntakeMessage = decode_intake(payload)
        except ProtocolError:
            continue
        if isinstance(message, Submit) and message.request_id not in core.requests:
            found.append(message)
    return found
