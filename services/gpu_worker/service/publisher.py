"""The writing lane: results go out in order while the next step computes."""

import logging
import queue
import threading
import time

from services.gpu_worker.profile import Part, StepProfile
from services.gpu_worker.service.backoff import delays
from services.gpu_worker.service.inbox import Inbox
from services.gpu_worker.service.seat import Seat
from shared.channel import Channel
from shared.fault_points import FaultPoint, pass_point
from shared.messages import StepResult, encode
from shared.redis_client import RedisFailure
from shared.scripts import AppendStatus, publish_step

log = logging.getLogger(__name__)


class Publisher:
    """Publishes the results of one incarnation until one is refused.

    A result whose reply is lost is sent again, byte for byte, until Redis answers: the script then says ALREADY. STALE
    closes the inbox: this incarnation is over.
    """

    def __init__(self, channel: Channel, seat: Seat, inbox: Inbox, profile: StepProfile) -> None:
        """`channel` is this lane's alone."""
        self._profile = profile
        self._channel = channel
        self._seat = seat
        self._inbox = inbox
        self._results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._published = 0
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, result: StepResult) -> None:
        """Queue `result`; never waits."""
        self._results.put(result)

    @property
    def published(self) -> int:
        """The last step that Redis acknowledged."""
        return self._published

    def finish(self, timeout_s: float) -> None:
        """Publish what is queued, for at most `timeout_s`, and end."""
        self._results.put(None)
        self._thread.join(timeout_s)
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # a publisher that ends unnoticed would leave the scheduler waiting for ever
            self._inbox.fail(error)
        finally:
            self._channel.close()

    def _follow(self) -> None:
        while not self._stopped.is_set():
            result = self._results.get()
            if result is None:
                return
            started = time.perf_counter()
            pass_point(FaultPoint.STEP_COMPUTED)
            status = self._publish(result.step_id, encode(result))
            pass_point(FaultPoint.STEP_PUBLISHED)
            self._profile.observe(Part.PUBLISH, time.perf_counter() - started)
            if status is AppendStatus.STALE:
                log.warning("step %d refused: incarnation %d is fenced", result.step_id, self._seat.incarnation)
                self._inbox.close_fenced()
                return
            self._published = result.step_id

    def _publish(self, step_id: int, payload: bytes) -> AppendStatus | None:
        """Publish one result, as often as it takes; None if told to stop meanwhile."""
        seat = self._seat
        for delay in delays():
            try:
                return publish_step(
                    self._channel,
                    seat.keys,
                    worker=seat.worker,
                    incarnation=seat.incarnation,
                    step_id=step_id,
                    payload=payload,
                )
            except RedisFailure as error:
                log.warning("cannot publish step %d: %s", step_id, error)
            if self._stopped.wait(delay):
                return None
        return None
