"""Gathers what a simulation shows, and makes its report."""

from collections.abc import Iterable, Sequence

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.simulator.clients import Clients
from services.scheduler.simulator.latency import StepLoad
from services.scheduler.simulator.measures import Curve, Level, Point, Samples
from services.scheduler.simulator.pool import Seat
from services.scheduler.simulator.report import Report, WorkerReport
from shared.messages import CopyKind


class Figures:
    """Of one run."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.clients = Clients()
        self._config = config
        self._running, self._waiting, self._curve = Level(), Level(), Curve()
        self._steps = Samples()
        self._rows = self._budget = 0

    def on_step(self, load: StepLoad, duration: float) -> None:
        self._steps.add(duration)
        self._rows += load.decode_rows
        self._budget += load.decode_rows + load.prefill_tokens

    def observe(self, core: SchedulerCore, seats: Iterable[Seat], num_held: int, now: float) -> None:
        """The queue and the blocks of these seats, as the core has them; `num_held` requests it has not seen yet."""
        num_waiting = len(core.waiting)
        self._waiting.set(now, num_waiting + num_held)
        self._running.set(now, len(core.requests) - num_waiting)
        for seat in seats:
            lane = core.lanes.get(seat.spec.name)
            if lane is not None and seat.worker is not None and lane.incarnation == seat.incarnation:
                seat.observe(lane.pool, self._config.block_size, now)
        if self._curve.wants(now):
            self._curve.add(_point(core, num_held, now))

    def report(self, core: SchedulerCore, seats: Sequence[Seat], *, num_ticks: int, now: float) -> Report:
        """Everything up to `now`."""
        clients, counters = self.clients, core.counters
        for seat in seats:
            if seat.worker is not None:
                seat.leave(now, core)
        self._running.set(now, 0)
        self._waiting.set(now, 0)
        began = min(clients.first_arrival, clients.last_token)
        duration = clients.last_token - began
        steps = self._steps.distribution()
        num_finished = sum(core.finished_by_reason.values())
        block_time = sum(seat.present_s * seat.spec.num_blocks for seat in seats)
        return Report(
            duration_s=duration,
            finished={str(reason): count for reason, count in core.finished_by_reason.items()},
            unfinished=len(core.requests),
            num_prompt_tokens=clients.num_prompt_tokens,
            num_output_tokens=clients.num_output_tokens,
            requests_per_s=_ratio(num_finished, duration),
            output_tokens_per_s=_ratio(clients.num_output_tokens, duration),
            ttft=clients.ttft.distribution(),
            itl=clients.itl.distribution(),
            queue_time=clients.queue_time.distribution(),
            latency=clients.latency.distribution(),
            num_steps=steps.count,
            busy_share=_ratio(sum(seat.busy_s for seat in seats), sum(seat.present_s for seat in seats)),
            step_s=steps,
            mean_decode_rows=_ratio(self._rows, steps.count),
            budget_share=_ratio(self._budget, steps.count * self._config.max_num_batched_tokens),
            running_mean=_ratio(self._running.integral, now - began),
            running_peak=int(self._running.peak),
            waiting_mean=_ratio(self._waiting.integral, now - began),
            waiting_peak=int(self._waiting.peak),
            used_share=_ratio(sum(seat.used.integral for seat in seats), block_time),
            used_share_peak=max(_ratio(seat.used.peak, seat.spec.num_blocks) for seat in seats),
            cached_share=_ratio(sum(seat.cached.integral for seat in seats), block_time),
            waste_share=_ratio(sum(s.empty.integral for s in seats), sum(s.slots.integral for s in seats)),
            hit_rate=_ratio(counters.cache_hits, counters.cache_queries),
            num_hit_tokens=counters.cache_hits,
            num_evictions=sum(seat.num_evictions for seat in seats),
            num_preemptions=counters.preemptions,
            num_requeues=counters.requeues,
            num_recomputed_tokens=clients.num_recomputed_tokens,
            swapped_out_blocks=sum(seat.copied[CopyKind.OUT] for seat in seats),
            swapped_in_blocks=sum(seat.copied[CopyKind.IN] for seat in seats),
            copied_blocks=sum(seat.copied[CopyKind.WITHIN] for seat in seats),
            num_plans=counters.plans,
            num_ticks=num_ticks,
            workers=tuple(_worker(seat) for seat in seats),
            ttft_samples=tuple(clients.ttft.sorted()),
            itl_samples=tuple(clients.itl.sorted()),
            curve=tuple(self._curve.points),
            clients=clients.reports(),
        )


def _point(core: SchedulerCore, num_held: int, now: float) -> Point:
    pools = [lane.pool for lane in core.lanes.values()]
    num_waiting = len(core.waiting)
    used = sum(pool.num_blocks - pool.num_available for pool in pools)
    cached = sum(pool.num_cached for pool in pools)
    return Point(now, num_waiting + num_held, len(core.requests) - num_waiting, used, cached)


def _worker(seat: Seat) -> WorkerReport:
    return WorkerReport(
        name=seat.spec.name,
        num_steps=seat.num_steps,
        num_tokens=seat.num_tokens,
        busy_share=_ratio(seat.busy_s, seat.present_s),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
