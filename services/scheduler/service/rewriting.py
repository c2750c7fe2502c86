"""A Redis that was started again is asked to rewrite its append-only file.

If the file breaks off inside a transaction, Redis (6.2 and 7.0 at least) leaves out what is there of it, but does not
cut it off: what is appended later follows the open `MULTI`, and the next start carries both out. So a tick that was
lost, and decided anew, would come back behind its successors. A rewritten file holds what Redis has, and no more.
"""

import redis

from services.scheduler.service import logs
from shared.keys import Keys
from shared.scripts import FenceState, note_redis


def rewrite_once(client: redis.Redis, keys: Keys, fence: FenceState, run_id: str) -> None:
    """Ask the Redis process `run_id` for it, if the fence tells of another one before it.

    Raises:
        RedisFailure: Redis did not answer.
    """
    if fence.redis_run_id == run_id:
        return
    try:
        if fence.redis_run_id and client.info("persistence")["aof_enabled"]:
            client.bgrewriteaof()
            logs.info("log_file_rewritten")
    except redis.ResponseError as error:  # it is at it already, or does not let us
        logs.warning("log_file_not_rewritten", reason=str(error))
    note_redis(client, keys, run_id)
