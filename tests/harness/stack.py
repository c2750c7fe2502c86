"""A whole Pagewire stack for tests: `pagewire up` as a child process, and what tests want to know about it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import IO

import httpx
from prometheus_client.parser import text_string_to_metric_families

from shared.keys import Keys
from shared.messages import (
    CopyKind,
    Decoder,
    EventKind,
    LogMessage,
    NewRow,
    RequestEvent,
    StepPlan,
    StepResult,
    TickEntry,
)
from shared.redis_client import connect, connect_blocking
from shared.scripts import read_fence
from shared.streams import entry_order, last_id, read

READY_TIMEOUT_S = 120.0


@dataclass(slots=True)
class LogWatch:
    """Everything that crossed the plan streams and the step log while it watched."""

    plans: list[tuple[StepPlan, int]] = field(default_factory=list)
    """(plan, bytes on the wire)."""
    planned_for: list[str] = field(default_factory=list)
    """The worker of each plan."""
    step_results: list[tuple[StepResult, int]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    """When Redis took each result with tokens, in seconds."""
    events: list[RequestEvent] = field(default_factory=list)

    @property
    def results(self) -> list[tuple[int, int]]:
        """(bytes, rows) of every step result."""
        return [(size, len(result.tokens) // 4) for result, size in self.step_results]

    def steady_decode_plans(self) -> list[tuple[int, int]]:
        """(bytes, changed blocks) of the plans in which no row came, went or was prefilled."""
        steady = ((p, size) for p, size in self.plans if not (p.added or p.dropped or p.chunks))
        return [(size, len(p.blocks) // 8) for p, size in steady]

    def chunk_sizes(self) -> list[int]:
        """Tokens of every prefill chunk."""
        return [count for plan, _ in self.plans for _, count in plan.chunks]

    def copied_blocks(self) -> dict[CopyKind, int]:
        """Blocks that were copied, by kind."""
        copied: Counter[CopyKind] = Counter()
        for plan, _ in self.plans:
            copied.update({copy.kind: len(copy.pairs) // 8 for copy in plan.copies})
        return copied

    def added_rows(self) -> list[NewRow]:
        """Every entry of a request into a batch."""
        return [new for plan, _ in self.plans for new in plan.added]

    def swapped_in(self) -> list[tuple[str, NewRow]]:
        """(worker, request) for each that came back with its KV, by copies from the host pool, and had only its last
        token left."""
        copying = [pair for pair in zip(self.planned_for, self.plans, strict=True) if _copies_in(pair[1][0])]
        return [(worker, new) for worker, (plan, _) in copying for new in plan.added if _is_all_but_computed(new)]

    def preemptions(self) -> Counter[str]:
        """By request: how often it was preempted."""
        return Counter(event.request_id for event in self.events if event.kind is EventKind.PREEMPTED)

    def longest_pause(self) -> float:
        """Seconds between two results with tokens."""
        return max(later - earlier for earlier, later in pairwise(self.token_times))

    def steps_by_worker(self) -> dict[str, int]:
        """Steps that yielded a token, per worker."""
        steps: dict[str, int] = {}
        for result, _ in self.step_results:
            steps[result.worker] = steps.get(result.worker, 0) + bool(result.tokens)
        return steps


def _copies_in(plan: StepPlan) -> bool:
    return any(copy.kind is CopyKind.IN for copy in plan.copies)


def _is_all_but_computed(new: NewRow) -> bool:
    return new.num_prompt_tokens <= new.num_computed_tokens == len(new.tokens) // 4 - 1


class Stack:
    """A running `pagewire up`."""

    keys = Keys("default")

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, state_dir: Path, redis_url: str) -> None:
        self.process = process
        self.url = url
        self.state_dir = state_dir
        self.redis_url = redis_url
        self.model: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def pids(self) -> dict[str, list[int]]:
        """What `pagewire ps --json` says."""
        command = [sys.executable, "-m", "services.cli", "ps", "--json", "--state-dir", str(self.state_dir)]
        told = dict(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=30).stdout))
        del told["gateway_urls"]
        return told

    def gateway_urls(self) -> list[str]:
        """The address of each gateway alone."""
        state = json.loads((self.state_dir / "state.json").read_text())
        return list(state["gateways"].values())

    def wait_pids(self, service: str, seconds: float = 30.0) -> list[int]:
        """The service's processes, as soon as there is one."""
        deadline = time.monotonic() + seconds
        while not (pids := self.pids()[service]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {service} after {seconds} s")
            time.sleep(0.1)
        return pids

    def metric(self, name: str, /, url: str = "", **labels: str) -> float:
        """Sum of the gateway's samples `pagewire:<name>` that carry these labels; 0 if there are none.

        `url`: of one gateway of several.
        """
        text = httpx.get(f"{url or self.url}/metrics", timeout=10).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"pagewire:{name}" and labels.items() <= sample.labels.items()
        )

    def num_log_lines(self) -> int:
        """Lines that all processes have logged so far."""
        return sum(len(log.read_bytes().splitlines()) for log in (self.state_dir / "logs").iterdir())

    def wait_idle(self, seconds: float = 30.0) -> None:
        """Until the leader says twice, further apart than it refreshes its gauges, that nothing runs or waits."""
        deadline = time.monotonic() + seconds
        idle_since: float | None = None
        while idle_since is None or time.monotonic() - idle_since < 1.0:
            busy = self.metric("num_requests_running") + self.metric("num_requests_waiting")
            idle_since = None if busy else idle_since or time.monotonic()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not idle after {seconds} s: {busy} requests")
            time.sleep(0.1)

    @contextmanager
    def watch_log(self) -> Iterator[LogWatch]:
        """Read all plan streams and the step log while the block runs."""
        watch, stop = LogWatch(), threading.Event()
        redis = connect(self.redis_url)
        workers = read_fence(redis, self.keys).workers
        plan_streams = {self.keys.plans(name, fence.incarnation): name for name, fence in workers.items()}
        positions = {stream: last_id(redis, stream) for stream in [*plan_streams, self.keys.steps]}
        redis.close()
        thread = threading.Thread(target=self._watch, args=(watch, plan_streams, positions, stop))
        thread.start()
        try:
            yield watch
        finally:
            stop.set()
            thread.join(10)

    def _watch(
        self, watch: LogWatch, plan_streams: dict[str, str], positions: dict[str, str], stop: threading.Event
    ) -> None:
        plan_decoder: Decoder[StepPlan] = Decoder(StepPlan)
        log_decoder: Decoder[LogMessage] = Decoder(LogMessage)
        redis = connect_blocking(self.redis_url, block_s=0.2)
        while not stop.is_set():
            for stream, entries in read(redis, positions, block_ms=200).items():
                positions[stream] = entries[-1].entry_id
                for entry in entries:
                    if stream != self.keys.steps:
                        watch.plans.append((plan_decoder.decode(entry.payload), len(entry.payload)))
                        watch.planned_for.append(plan_streams[stream])
                    elif isinstance(message := log_decoder.decode(entry.payload), StepResult):
                        watch.step_results.append((message, len(entry.payload)))
                        watch.token_times += [entry_order(entry.entry_id)[0] / 1000] if message.tokens else []
                    elif isinstance(message, TickEntry):
                        watch.events += message.events
        redis.close()

    def stop(self) -> int:
        """Ctrl-C; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


def _arguments(flags: dict[str, object]) -> list[str]:
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items())
    return [part for pair in pairs for part in pair]


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The URL of the line `ready http://…`."""
    lines: list[str] = []
    ready = threading.Event()

    def pump(stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                lines.append(line.decode().strip())
                if lines[-1].startswith("ready "):
                    ready.set()
        ready.set()

    assert process.stdout is not None
    threading.Thread(target=pump, args=(process.stdout,), daemon=True).start()
    ready.wait(READY_TIMEOUT_S)
    urls = [line.removeprefix("ready ") for line in lines if line.startswith("ready ")]
    if not urls:
        raise RuntimeError(f"the stack did not start: {lines}\n{log.read_text()[-4000:]}")
    return urls[0]


@contextmanager
def running_stack(
    folder: Path, port: int, home: Path, variables: Mapping[str, str] = MappingProxyType({}), /, **flags: object
) -> Iterator[Stack]:
    """`pagewire up` with `flags`, state under `folder`; ended by Ctrl-C, which must leave nothing behind.

    `variables`: of the environment, for settings of services that are no flags.
    """
    state_dir, log = folder / "state", folder / "up.log"
    command = [sys.executable, "-m", "services.cli", "up", "--port", str(port), "--state-dir", str(state_dir)]
    environment = {**os.environ, "PAGEWIRE_HOME": str(home), **variables}
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [*command, *_arguments(flags)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
    stack: Stack | None = None
    try:
        url = _wait_ready(process, log)
        state = json.loads((state_dir / "state.json").read_text())
        stack = Stack(process, url, state_dir, state["redis_url"])
        yield stack
        assert stack.stop() == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
