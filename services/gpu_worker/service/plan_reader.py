"""The reading lane: follows one incarnation's plan stream ahead of the computation."""

import logging
import threading
from collections.abc import Callable

import redis

from services.gpu_worker.service.backoff import delays
from services.gpu_worker.service.inbox import Inbox, PlanEntry
from services.gpu_worker.service.seat import Seat
from shared.errors import MalformedMessage, ProtocolError
from shared.messages import Decoder, StepPlan
from shared.redis_client import RedisFailure, connect, open_channel_blocking
from shared.streams import START, entry_order, last_id, read_channel

log = logging.getLogger(__name__)
_decoder: Decoder[StepPlan] = Decoder(StepPlan)

BLOCK_S = 0.5
"""An idle reader looks at the fence this often: a worker without plans must also notice that it was fenced."""


class PlanReader:
    """Puts every plan of `seat` into `inbox`, in order and without gaps, from the first one on."""

    def __init__(self, url: str, seat: Seat, inbox: Inbox, *, published: Callable[[], int]) -> None:
        self._channel = open_channel_blocking(url, block_s=BLOCK_S)
        self._client = connect(url)
        self._seat = seat
        self._inbox = inbox
        self._published = published
        self._stopped = threading.Event()
        self._last_plan = 0
        self._thread = threading.Thread(target=self._run, name="plan-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Read no more. The thread ends by itself within one blocking read; nothing waits for it."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # a reader that ends unnoticed would leave the worker waiting for ever
            self._inbox.fail(error)
        finally:
            self._channel.close()
            self._client.close()

    def _follow(self) -> None:
        position, waits = START, delays()
        while not self._stopped.is_set():
            try:
                entries = read_channel(self._channel, {self._seat.plans: position}, block_ms=int(BLOCK_S * 1000))
                if not entries and not self._is_held():
                    return
            except RedisFailure as error:
                log.warning("cannot read plans of incarnation %d: %s", self._seat.incarnation, error)
                self._stopped.wait(next(waits))
                continue
            waits = delays()
            for entry_id, payload in entries.get(self._seat.plans, ()):
                self._accept(payload)
                position = entry_id

    def _accept(self, payload: bytes) -> None:
        if not payload:
            raise MalformedMessage(f"plan stream of incarnation {self._seat.incarnation}: an entry without a message")
        plan = _decoder.decode(payload)
        if plan.plan_id != self._last_plan + 1:
            raise ProtocolError(f"plan {plan.plan_id} follows plan {self._last_plan}")
        self._last_plan = plan.plan_id
        self._inbox.put(PlanEntry(plan, payload))

    def _is_held(self) -> bool:
        if self._seat.is_held(self._client, published=self._published()):
            return True
        self._inbox.close_fenced()
        return False


def last_plan_in_stream(client: redis.Redis, seat: Seat) -> int:
    """Id of the newest plan of `seat`, 0 if there is none."""
    return entry_order(last_id(client, seat.plans))[0]
