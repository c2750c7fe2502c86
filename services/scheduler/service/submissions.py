"""The records that intake points to."""

from collections.abc import Iterable

import redis

from services.scheduler.service import logs
from shared.keys import Keys
from shared.messages import IntakeMessage, Submission, Submit
from shared.records import read_submissions


def load_submissions(client: redis.Redis, keys: Keys, intake: Iterable[IntakeMessage]) -> dict[str, Submission]:
    """Sound submissions of all `Submit` in `intake`, in one round trip. Live operation and replay see the same ones.

    Raises:
        RedisFailure: Redis did not answer.
    """
    ids = list(dict.fromkeys(message.request_id for message in intake if isinstance(message, Submit)))
    if not ids:
        return {}
    found = {i: s for i, s in read_submissions(client, keys, ids).items() if is_sound(s)}
    if len(found) < len(ids):
        logs.warning("submissions_unreadable", request_ids=[i for i in ids if i not in found])
    return found


def is_sound(submission: Submission) -> bool:
    """Whether the core can work with it. Gateways check far more; this guards the core against anybody else."""
    num_bytes = len(submission.prompt_tokens)
    return num_bytes >= 4 and num_bytes % 4 == 0 and 1 <= submission.params.max_tokens < 2**31
