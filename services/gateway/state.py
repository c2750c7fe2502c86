"""Everything that a running gateway holds, opened and closed in one place."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from services.gateway.background import Background
from services.gateway.cancelling import cancel_and_wait
from services.gateway.health import READY, PoolMonitor, Readiness, first_unready
from services.gateway.http.body import BodyRoom
from services.gateway.metrics import Metrics
from services.gateway.settings import Settings
from services.gateway.streams.custody import PATIENCE_S, Custody
from services.gateway.streams.engine import Engine
from services.gateway.streams.intake import Intake
from services.gateway.streams.reader import StepLogReader
from services.gateway.text.tokenizer import TextTokenizer
from services.gateway.tracing import Tracing
from shared.errors import Unavailable
from shared.keys import Keys
from shared.leases import LeaseKeeper, new_instance
from shared.limits import Limits
from shared.messages import Lease, WorkerState
from shared.records import LIVE_TTL_S
from shared.redis_client import connect_async, open_ahead

STALLED_S = 10.0
"""The log reader turns at least about once per second; silence this long means that it does not work."""
SHORT_BODY = 1024
"""Bytes. The text of a shorter one takes less than a millisecond (256 sequences of one prompt: two), and to hand it
over to a thread costs as much CPU time as that of a usual one. It is worked on in the event loop, and waits behind no
long one."""
TEXT_PLACES = 2
"""Requests for each text thread that are handed over to it: it has the next one at hand, and a flood does not get ahead
of the first refusal."""
FLUSH_S = 3.0
"""Time to hand the last aborts to Redis at shutdown."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GatewayState:
    """One gateway process."""

    settings: Settings
    engine: Engine
    monitor: PoolMonitor
    tracing: Tracing
    lease: LeaseKeeper
    text_pool: ThreadPoolExecutor
    _text_places: asyncio.Semaphore
    """Held by requests whose text is worked on; who waits for one has cost next to nothing yet."""
    body_room: BodyRoom
    started: float
    """Unix time."""

    @property
    def components(self) -> dict[str, Readiness]:
        """Each part that serving needs, and the reason of each that is not ready."""
        return {**self.monitor.components, "step_log": self._step_log}

    @property
    def readiness(self) -> Readiness:
        """Of this gateway and its pool."""
        return first_unready(self.components)

    @property
    def _step_log(self) -> Readiness:
        turn = self.engine.reader.last_turn
        if turn is None:
            return Readiness("starting", "this gateway has not read the step log yet")
        is_stalled = time.monotonic() - turn > STALLED_S
        return Readiness("step_log_stalled", "this gateway cannot read the step log") if is_stalled else READY

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, as far as it is known: of this gateway's settings, the pool and the model."""
        view = self.monitor.view
        pool = view.limits.max_model_len if view is not None else 0
        known = [n for n in (self.settings.max_model_len, pool) if n]
        return min(known, default=self.engine.tokenizer.max_model_len or 0)

    def admit(self) -> Limits:
        """Limits for a new request; raises `Unavailable` if none can be taken."""
        limits = self.monitor.admit(reader_started=self.engine.reader.is_started)
        return replace(limits, max_model_len=self.max_model_len)

    def require_reader(self) -> None:
        """
        Raises:
            Unavailable: the log cannot be read yet.
        """
        if not self.engine.reader.is_started:
            raise Unavailable("this gateway is starting", reason="starting")

    def text_place(self, body: bytes) -> AbstractAsyncContextManager[None]:
        """To be held while the text of `body` is worked on; a short one needs none."""
        return nullcontext() if len(body) <= SHORT_BODY else self._text_places

    async def work_on_text(self, body: bytes, function: Callable[..., T], *args: Any) -> T:
        """`function(body, *args)`, outside the event loop unless `body` is short."""
        if len(body) <= SHORT_BODY:
            return function(body, *args)
        return await asyncio.get_running_loop().run_in_executor(self.text_pool, function, body, *args)

    def start_draining(self) -> None:
        """Not ready from now on; what runs may finish."""
        self.monitor.draining = True
        self.lease.update(state=WorkerState.DRAINING)


@asynccontextmanager
async def open_gateway(
    settings: Settings, tokenizer: TextTokenizer, on_fatal: Callable[[], None]
) -> AsyncIterator[GatewayState]:
    """Start the gateway's tasks; stop them behind the block. `on_fatal`: a task died of a fault of ours."""
    keys, loop = Keys(settings.pool), asyncio.get_running_loop()
    client = connect_async(settings.redis_url)
    # Of its own: health and windows wait behind no burst of requests, nor long for an answer that does not come.
    prompt_client = connect_async(settings.redis_url, timeout_s=PATIENCE_S)
    monitor = PoolMonitor(prompt_client, keys, admission_grace_s=settings.admission_grace_s)
    reader = StepLogReader(
        settings.redis_url, keys, outage_limit_s=settings.outage_limit_s, pool_outage_s=monitor.outage_s
    )
    intake = Intake(client, keys, record_ttl_s=LIVE_TTL_S)
    metrics = Metrics(
        settings.metrics_prefix,
        settings.model_names[0],
        lambda: monitor.view,
        live=lambda: reader.num_live,
        tasks=lambda: len(asyncio.all_tasks(loop)),
    )
    tracing = Tracing(settings.trace_exporter)
    text_pool = ThreadPoolExecutor(settings.text_threads, "text")
    custody, background = Custody(prompt_client, keys), Background()
    state = GatewayState(
        settings=settings,
        engine=Engine(reader, intake, metrics, custody, background, tokenizer, text_pool),
        monitor=monitor,
        tracing=tracing,
        lease=LeaseKeeper(settings.redis_url, keys, _lease(settings)).start(),
        text_pool=text_pool,
        _text_places=asyncio.Semaphore(TEXT_PLACES * settings.text_threads),
        body_room=BodyRoom(settings.max_bodies_bytes),
        started=time.time(),
    )
    ahead = partial(open_ahead, client)
    tasks = [_background(run(), on_fatal) for run in (ahead, monitor.run, reader.run, intake.run, custody.run)]
    try:
        yield state
    finally:
        await background.close()
        await _flush(intake)
        await cancel_and_wait(*tasks)
        await asyncio.to_thread(state.lease.stop)
        state.text_pool.shutdown(wait=False, cancel_futures=True)
        tracing.close()
        await client.aclose()
        await prompt_client.aclose()


def _background(work: Coroutine[Any, Any, None], on_fatal: Callable[[], None]) -> asyncio.Task[None]:
    def check(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical("a background task died", exc_info=task.exception())
            on_fatal()

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(check)
    return task


async def _flush(intake: Intake) -> None:
    try:
        async with asyncio.timeout(FLUSH_S):
            await intake.flush()
    except TimeoutError:
        logger.warning("shutdown: some aborts could not be sent; this gateway's lease lapses instead")


def _lease(settings: Settings) -> Lease:
    return Lease(
        service="gateway",
        name=settings.name,
        instance=settings.instance or new_instance(),
        pid=os.getpid(),
        state=WorkerState.READY,
        model=settings.model_names[0],
    )
