"""What every scenario of the fault tests needs: options, a stack whose texts are known, a report."""

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx

from benchmarks.report import Bar, Report, Row
from services.cli.ports import free_port
from services.cli.settings import load_settings
from services.cli.state_dir import SERVICES
from tests.harness.audit import Audit
from tests.harness.chaos_plan import Fault
from tests.harness.fault_model import TINY, FaultModel, prepare_model
from tests.harness.injector import Hit, Injector, services_struck
from tests.harness.pool_state import PoolState, wait_for
from tests.harness.reference_text import complete_all, records_of
from tests.harness.stack import Stack, running_stack
from tests.harness.streams import Outcome, Reference, StreamLoad

SETTLE_S = 180.0
"""Longest time from a fault to a whole pool again: a worker loads its model anew."""
QUIET_S = 1.5
LOOK_S = 0.1
"""Between two looks at a whole pool: they would take the cores from the streams that are timed."""
WORKERS = 2
NUM_BLOCKS = 1600
"""Enough for all streams at one worker, and few: a worker that comes back touches them all."""
RECORD_TTL_S = "86400"
"""Records are compared at the end of a scenario, which may take hours."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    seed: int = 0
    model: str = TINY
    streams: int = 32
    """In flight when a fault comes."""
    kills: int = 200
    """Random ones, over gateway, scheduler and worker."""
    windows: int = 10
    """Times that each named window is hit."""
    repeats: int = 20
    """Of each fault whose recovery is measured, and of pauses."""
    redis_faults: int = 5
    """Restarts, losses of the file's end and of all data, each."""
    requests: int = 5000
    """Of clients that leave."""
    soak: int = 20_000
    """Requests of the soak."""
    posts: int = 2000
    """Prompts at once while health is asked for."""


@dataclass(slots=True)
class Recovery:
    """Pauses of streams, in seconds, after one kind of fault."""

    kind: str
    pauses: list[float] = field(default_factory=list)
    limit_s: float | None = None

    def observe(self, struck: Sequence[tuple[list[Outcome], float]]) -> None:
        """Add the pauses of streams that were in flight when a fault came, each until the next fault."""
        ends = [at for _, at in struck[1:]] + [float("inf")]
        for (flying, at), until in zip(struck, ends, strict=True):
            pauses = (outcome.recovery_s(at, until) for outcome in flying)
            self.pauses += [pause for pause in pauses if pause is not None]

    @property
    def row(self) -> Row:
        """Percentiles in seconds, of at least one pause."""
        cuts = statistics.quantiles(self.pauses * 2, n=100, method="inclusive")  # twice: it asks for two at least
        return {
            "fault": self.kind,
            "pauses": len(self.pauses),
            "p50 s": cuts[49],
            "p90 s": cuts[89],
            "p99 s": cuts[98],
            "longest s": max(self.pauses),
        }


@dataclass(slots=True)
class FaultRun:
    """One invocation: scenarios add what they found to `report`."""

    options: Options
    report: Report
    folder: Path
    keep: bool = False
    """State and logs of the stacks stay."""
    recoveries: list[Recovery] = field(default_factory=list)
    hits: list[tuple[str, Hit]] = field(default_factory=list)
    """(scenario, fault)."""
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Scenario → what was sampled in it → values, in order."""
    _model: FaultModel | None = None
    _references: list[Reference] = field(default_factory=list)
    """Found on the first stack."""

    @property
    def model(self) -> FaultModel:
        """Prepared once."""
        if self._model is None:
            self._model = prepare_model(self.options.model, self.folder / "model")
        return self._model

    @contextmanager
    def scene(
        self, name: str, variables: Mapping[str, str] = MappingProxyType({}), /, **flags: object
    ) -> Iterator["Scene"]:
        """A stack for the scenario of this name, with known texts."""
        folder = self.folder / name
        fault_dir = folder / "faults"
        fault_dir.mkdir(parents=True)
        home = load_settings({}).home.expanduser()
        own = {"PAGEWIRE_FAULT_DIR": str(fault_dir), "PAGEWIRE_RECORD_TTL_S": RECORD_TTL_S, **variables}
        sizes = {"num_blocks": NUM_BLOCKS, "gateways": 2}
        chosen: dict[str, object] = {"model": self.model.model, "dtype": "float32", **sizes, **flags}
        with (
            running_stack(folder, free_port(), home, own, workers=WORKERS, **chosen) as stack,
            httpx.Client(timeout=2) as http,
        ):
            pool = PoolState(stack)
            try:
                counts = {service: len(pool.children(service)) for service in SERVICES}
                scene = Scene(self, name, stack, pool, Injector(pool, fault_dir), counts, http)
                wait_for("all workers", lambda: pool.num_serving() == WORKERS, SETTLE_S)
                self._references = self._references or references(stack, self.model)
                scene.references = list(self._references)
                scene.num_usage_before = len(pool.usage())
                yield scene
            finally:
                pool.close()

    def add_recovery(self, recovery: Recovery) -> None:
        """The table and the bar of pauses."""
        if not recovery.pauses:
            self.report.lacks(f"{recovery.kind}: no stream was in flight")
            return
        self.recoveries.append(recovery)
        row = recovery.row
        bar = Bar(f"{recovery.kind}: p99 recovery", float(row["p99 s"] or 0), recovery.limit_s or 0.0, "s")
        self.report.add(f"{recovery.kind}, recovery", [row], [bar] if recovery.limit_s else [])

    def add_audit(self, name: str, audit: Audit, **figures: float | str) -> None:
        """The table and the bar of a comparison."""
        row: Row = {
            "scenario": name,
            "streams": audit.num_streams,
            "tokens": audit.num_tokens,
            "resumed": audit.num_resumed,
            "refused": audit.num_refused,
            "excused": audit.num_excused,
            **figures,
            "wrong": len(audit.faults),
        }
        for fault in audit.faults[:20]:
            print(f"  WRONG {fault}", flush=True)
        self.report.add(
            name, [row], [Bar(f"{name}: wrong texts, usage records, idle states", len(audit.faults), 0, "")]
        )


@dataclass(slots=True)
class Scene:
    """A running stack in one scenario."""

    run: FaultRun
    name: str
    stack: Stack
    pool: PoolState
    injector: Injector
    num_processes: dict[str, int]
    """Of each service, of a whole pool; Redis may be none of its own."""
    http: httpx.Client
    """One, since making one takes as long as computing a token."""
    references: list[Reference] = field(default_factory=list)
    num_usage_before: int = 0
    """Of the references."""
    began_at: float = field(default_factory=time.monotonic)

    @property
    def pids(self) -> list[int]:
        """Of all processes: equal before and after a fault that is none's end."""
        return [child.pid for service in SERVICES for child in self.pool.children(service)]

    def load(self, count: int, urls: Sequence[str] = ()) -> StreamLoad:
        """Streams at these gateways (none: at all), to be used as a context manager."""
        return StreamLoad(urls or self.stack.gateway_urls(), self.references, count, seed=self.run.options.seed)

    def strike(self, fault: Fault, load: StreamLoad, num_in_flight: int) -> Hit:
        """Carry out one fault with so many streams in flight, once whom it strikes has recovered from earlier ones.

        Others may still be starting: a gateway dies while a worker loads.
        """
        self.wait_whole(services_struck(fault.kind))
        time.sleep(fault.after_s)
        load.wait_in_flight(num_in_flight)
        hit = self.injector.carry_out(fault, lambda: len(load.in_flight))
        self.run.hits.append((self.name, hit))
        return hit

    def wait_whole(self, services: Sequence[str] = SERVICES, seconds: float = SETTLE_S) -> None:
        """Until all processes of these services are there: standbys follow, the leader has all workers."""
        is_ready = {
            "gateway": self._gateways_live,
            "scheduler": lambda: self.pool.are_ready("scheduler"),
            "gpu_worker": lambda: self.pool.are_ready("gpu_worker") and self.pool.num_serving() == WORKERS,
        }

        def is_whole(service: str) -> bool:
            is_there = len(self.pool.children(service)) >= self.num_processes[service]
            return is_there and is_ready.get(service, lambda: True)()

        wait_for(f"all of {', '.join(services)}", lambda: all(map(is_whole, services)), seconds, LOOK_S)

    def settle(self, load: StreamLoad, seconds: float = SETTLE_S) -> None:
        """Until the pool is whole, and every stream that was in flight goes on or has ended.

        What was on its way when the fault came is over within `QUIET_S` and proves nothing.
        """
        since, flying = time.monotonic() + QUIET_S, load.in_flight

        def all_go_on() -> bool:
            return all(outcome.ended_at or outcome.arrivals[-1] > since for outcome in flying)

        self.wait_whole(seconds=seconds)
        wait_for("tokens of every stream in flight", all_go_on, seconds, LOOK_S)

    def _gateways_live(self) -> bool:
        try:
            return all(self.http.get(f"{url}/health/ready").is_success for url in self.stack.gateway_urls())
        except httpx.HTTPError:
            return False

    def audit(self, load: StreamLoad) -> Audit:
        """Everything that holds after faults which no client may notice."""
        audit = Audit()
        audit.check_idle(self.pool)
        audit.check_streams(load.ended)
        audit.check_records(self.pool, load.ended)
        audit.check_usage(self.pool, load.ended, self.num_usage_before)
        return audit


def references(stack: Stack, model: FaultModel) -> list[Reference]:
    """Half of the prompts greedily, half at temperature 0.9 with a seed, each as it goes when nothing happens.

    Raises:
        AssertionError: a greedy text is not that of Transformers.
    """
    bodies: list[dict[str, object]] = [
        {
            "model": stack.model,
            "prompt": prompt,
            "max_tokens": model.num_tokens,
            "ignore_eos": True,
            "temperature": 0.9 if index % 2 else 0,
            "seed": index,
            "stream_options": {"include_usage": True},
        }
        for index, prompt in enumerate(model.prompts)
    ]
    whole = [{name: value for name, value in body.items() if name != "stream_options"} for body in bodies]
    answers = asyncio.run(complete_all(stack, whole))
    records = records_of(stack, [answer["id"] for answer in answers])
    for index, greedy in model.greedy.items():
        found = list(records[index].output[: len(greedy)])
        assert found == greedy, f"prompt {index}: the pool's greedy text is not that of Transformers"
    return [
        Reference(body, answer["choices"][0]["text"], tuple(record.output))
        for body, answer, record in zip(bodies, answers, records, strict=True)
    ]


@contextmanager
def fault_run(options: Options, keep: bool = False) -> Iterator[FaultRun]:
    """A run in a folder of its own, which goes with it unless `keep` is set, a bar is missed, or the run breaks off."""
    folder = Path(tempfile.mkdtemp(prefix="pagewire-fault-"))
    title = f"faults (seed {options.seed}, {options.model} model, pid {os.getpid()})"
    run = FaultRun(options, Report(title), folder, keep)
    try:
        yield run
    except BaseException:
        print(f"logs are kept in {folder}", flush=True)
        raise
    if run.keep or not all(bar.is_met for bar in run.report.bars):
        print(f"logs are kept in {folder}", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
