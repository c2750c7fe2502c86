"""A leader and its workers that answer each request with a script, over the real streams and scripts of Redis.

Only for tests of the gateway: it decides nothing, but what it writes is what a real pool would write.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from shared import scripts
from shared.channel import Channel
from shared.keys import Keys
from shared.leases import LeaseKeeper, new_instance
from shared.limits import write_limits
from shared.messages import (
    Abort,
    Decoder,
    EndReason,
    EventKind,
    Final,
    FinishReason,
    Hypothesis,
    IntakeMessage,
    Lease,
    PoolStats,
    RequestEvent,
    StepResult,
    Stop,
    Submission,
    Submit,
    Tick,
    TickEntry,
    WorkerState,
    encode,
)
from shared.packing import NO_TOKEN, pack_float32, pack_int32
from shared.records import Seat, final_fields, fold_fields, read_submissions
from shared.redis_client import RedisFailure, connect
from shared.streams import START, last_id, read

NUM_ROWS = 256
NUM_BLOCKS = 100


@dataclass(frozen=True)
class Script:
    """What happens to one request: tokens one by one, then an ending by the worker or by the scheduler."""

    tokens: Sequence[int]
    end: EndReason | None = EndReason.EOS
    """By the worker, with the last token; cut short by `max_tokens` as a worker would."""
    event: FinishReason | None = None
    """By the scheduler, after the last token, if `end` is None. Neither: it goes on for ever without tokens."""
    message: str = ""
    hold_after: int | None = None
    """No token beyond this many before `release`."""
    worker: str = "worker-0"
    num_cached: int = 0
    """Prompt tokens that the prefix cache holds."""
    logprobs: Sequence[float] = ()
    """Of the tokens, if the request asks for them; −1 each by default."""
    hypotheses: Sequence[Hypothesis] = ()
    """What a beam search finds: it ends as soon as it may go on."""

    def logprob(self, index: int) -> float:
        return self.logprobs[index] if index < len(self.logprobs) else -1.0


@dataclass
class _Run:
    submission: Submission
    script: Script
    row: int
    output: list[int] = field(default_factory=list)
    joined: bool = False
    end: EndReason | None = None

    @property
    def is_beam_search(self) -> bool:
        return self.submission.params.beam_width > 0

    def logprobs(self, count: int) -> list[float]:
        """Of the first `count` tokens; empty if they are not asked for."""
        wanted = self.submission.params.with_logprobs
        return [self.script.logprob(index) for index in range(count)] if wanted else []


@dataclass
class _Worker:
    incarnation: int
    step: int = 0
    rows: dict[int, _Run] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)


class ScriptedPool:
    """`with ScriptedPool(url, keys, script): …`. All public attributes may be read while it runs."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        script: Callable[[Submission], Script],
        *,
        workers: Sequence[str] = ("worker-0",),
        step_s: float = 0.002,
        max_model_len: int = 512,
        cap_requests: int = 0,
    ) -> None:
        self.client = connect(url)
        self._channel = Channel(self.client)
        self.keys = keys
        self.script = script
        self.step_s = step_s
        self.intake: list[Any] = []
        """Every intake message, in order."""
        self.submissions: dict[str, Submission] = {}
        self.lost_steps = 0
        """Set to n: the next n steps are carried out but not published (the records are folded instead)."""
        self._caps = {"max_model_len": max_model_len, "max_request_tokens": max_model_len, "cap_requests": cap_requests}
        self._names = list(workers)
        self._workers: dict[str, _Worker] = {}
        self._released = threading.Event()
        self._stopping = threading.Event()
        self._paused = threading.Event()
        self._decoder: Decoder[Any] = Decoder(IntakeMessage)
        self._intake_id = START
        self._instance = new_instance()
        self._epoch = 0
        self._tick = 0
        self._leases: list[LeaseKeeper] = []
        self._url = url
        self._thread = threading.Thread(target=self._run, name="scripted-pool", daemon=True)
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._lead()
        for name in self._names:
            lease = Lease("gpu_worker", name, new_instance(), 0, WorkerState.READY, num_blocks=NUM_BLOCKS)
            self._leases.append(LeaseKeeper(self._url, self.keys, lease).start())
            incarnation = scripts.fence_worker(
                self.client, self.keys, epoch=self._epoch, worker=name, expected=0, new_holder=lease.instance, reason=""
            )
            self._workers[name] = _Worker(incarnation)
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """End leader and workers, as if they had been stopped in order."""
        self._stopping.set()
        self._thread.join()
        for lease in self._leases:
            lease.stop()
        self._leases = []
        self.client.delete(self.keys.leader_lease, self.keys.stats)

    def release(self) -> None:
        """Let scripts go on behind their `hold_after`."""
        self._released.set()

    def pause(self) -> None:
        """No steps, no intake, until `resume`; leases stay."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def fold(self) -> None:
        """Fold what has been committed into the records, as a leader does every few seconds. Only while all is held."""
        for name, worker in self._workers.items():
            self._fold(name, worker)

    def roll_back(self, count: int, script: Script) -> None:
        """As if Redis had lost the last `count` steps, and the worker went on by `script`. Only while paused."""
        entries: Any = self.client.xrevrange(self.keys.steps, count=count)
        for entry_id, _ in entries:
            self.client.xdel(self.keys.steps, entry_id)
        for name, worker in self._workers.items():
            worker.step -= count
            self.client.hset(self.keys.fence, f"step:{name}", worker.step)
            for run in worker.rows.values():
                del run.output[-count:]
                run.script = script

    def messages(self, kind: type[Any]) -> list[Any]:
        """Intake messages of one type, so far."""
        return [m for m in list(self.intake) if isinstance(m, kind)]

    def messages_of_abort(self) -> list[Abort]:
        """Aborts, so far."""
        return self.messages(Abort)

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> Any:
        """The condition's first true value."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if value := condition():
                return value
            time.sleep(0.005)
        raise AssertionError(f"nothing within {timeout_s} s; intake: {self.intake}")

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        told = 0.0
        try:
            while not self._stopping.is_set():
                if time.monotonic() - told > 0.4:
                    told = time.monotonic()
                    self._renew()
                if self._paused.is_set():
                    time.sleep(0.005)
                    continue
                self._read_intake()
                for name, worker in self._workers.items():
                    self._step(name, worker)
                time.sleep(self.step_s)
        except BaseException as error:
            self.failure = error

    def _renew(self) -> None:
        try:
            self._lead()
            self._tell()
        except RedisFailure:
            if not self._paused.is_set():
                raise

    def _lead(self) -> None:
        lease = Lease("scheduler", "scheduler-0", self._instance, 0, WorkerState.READY)
        self._epoch = scripts.acquire(self.client, self.keys, instance=self._instance, ttl_ms=2000, lease=lease)

    def _tell(self) -> None:
        write_limits(self.client, self.keys, **self._caps)
        running = sum(len(w.rows) for w in self._workers.values())
        stats = PoolStats(self._epoch, self._tick, running, 0, NUM_BLOCKS, NUM_BLOCKS - running, 0, 3, 1, 7, 0)
        self.client.set(self.keys.stats, encode(stats), px=2000)

    def _read_intake(self) -> None:
        # Not blocking: Redis may round a short block up to 100 ms.
        answer = read(self.client, {self.keys.intake: self._intake_id})
        for entry in answer.get(self.keys.intake, ()):
            self._intake_id = entry.entry_id
            message = self._decoder.decode(entry.payload)
            self.intake.append(message)
            if isinstance(message, Submit):
                self._admit(message.request_id)
                write_limits(self.client, self.keys, left=len(self.submissions))
            elif isinstance(message, Abort):
                self._drop(message.request_id, FinishReason.ABORT)
            elif isinstance(message, Stop):
                self._drop(message.request_id, FinishReason.STOP, message.num_output_tokens)

    def _admit(self, request_id: str) -> None:
        submission = read_submissions(self.client, self.keys, [request_id])[request_id]
        self.submissions[request_id] = submission
        script = self.script(submission)
        rows = self._workers[script.worker].rows
        row = next(r for r in range(NUM_ROWS) if r not in rows)
        rows[row] = _Run(submission, script, row)
        if script.num_cached:
            self._commit(TickEntry(self._next_tick(), cached=((request_id, script.num_cached),)))

    def _drop(self, request_id: str, reason: FinishReason, count: int | None = None) -> None:
        for worker in self._workers.values():
            for row, run in list(worker.rows.items()):
                if run.submission.request_id == request_id:
                    del worker.rows[row]
                    worker.left.append(row)
                    self._finish(run, reason, count)

    # ---------------------------------------------------------------- steps

    def _step(self, name: str, worker: _Worker) -> None:
        tokens, joined, ended, logprobs = [NO_TOKEN] * NUM_ROWS, [], [], []
        for row, run in worker.rows.items():
            token = self._next_token(run)
            if token is None:
                continue
            if not run.joined:
                joined.append((row, run.submission.request_id, len(run.output)))
                run.joined = True
            tokens[row] = token
            run.output.append(token)
            logprobs += [(row, logprob) for logprob in run.logprobs(len(run.output))[-1:]]
            run.end = self._end_of(run)
            if run.end is not None:
                ended.append((row, int(run.end)))
        if any(t != NO_TOKEN for t in tokens):
            columns = {"tokens": pack_int32(tokens), "joined": tuple(joined), "ended": tuple(ended)}
            self._publish(name, worker, logprobs=tuple(logprobs), **columns)
        for run in [r for r in worker.rows.values() if r.end is not None or self._is_over(r)]:
            del worker.rows[run.row]
            self._finish(run, _reason(run))

    def _next_token(self, run: _Run) -> int | None:
        at = len(run.output)
        over = run.is_beam_search or at >= len(run.script.tokens)
        return None if over or self._is_held(run) else run.script.tokens[at]

    def _is_held(self, run: _Run) -> bool:
        hold_after = run.script.hold_after
        return hold_after is not None and len(run.output) >= hold_after and not self._released.is_set()

    def _end_of(self, run: _Run) -> EndReason | None:
        params = run.submission.params
        if run.output[-1] in params.stop_token_ids:
            return EndReason.STOP_TOKEN
        if len(run.output) == len(run.script.tokens) and run.script.end is not None:
            return run.script.end
        return EndReason.LENGTH if len(run.output) >= params.max_tokens else None

    def _is_over(self, run: _Run) -> bool:
        if run.is_beam_search:
            return not self._is_held(run)
        return run.script.event is not None and len(run.output) == len(run.script.tokens)

    def _publish(self, name: str, worker: _Worker, **columns: Any) -> None:
        worker.step += 1
        left, worker.left = tuple(worker.left), []
        result = StepResult(name, worker.incarnation, worker.step, left=left, **columns)
        payload = encode(result)
        if self.lost_steps > 0:
            self.lost_steps -= 1
            self.client.hset(self.keys.fence, f"step:{name}", worker.step)  # published, and trimmed since
            self._fold(name, worker)
            return
        status = scripts.publish_step(
            self.client, self.keys, worker=name, incarnation=worker.incarnation, step_id=worker.step, payload=payload
        )
        assert status is scripts.AppendStatus.OK

    def _fold(self, name: str, worker: _Worker) -> None:
        """Fold the committed output into the records, as a leader does before it trims the log."""
        log_id = last_id(self.client, self.keys.steps)
        for run in worker.rows.values():
            seat = Seat(name, worker.incarnation, run.row, worker.step)
            logprobs = pack_float32(run.logprobs(len(run.output)))
            fields: Any = fold_fields(pack_int32(run.output), log_id, seat, run.script.num_cached, logprobs)
            self.client.hset(self.keys.request(run.submission.request_id), mapping=fields)

    def _finish(self, run: _Run, reason: FinishReason, count: int | None = None) -> None:
        request_id, output = run.submission.request_id, pack_int32(run.output)
        hypotheses: tuple[Hypothesis, ...] = ()
        if run.is_beam_search and reason is not FinishReason.ABORT:
            hypotheses = tuple(run.script.hypotheses)
            output, reason = hypotheses[0].tokens if hypotheses else b"", FinishReason.STOP
        count = len(output) // 4 if count is None else count
        logprobs = run.logprobs(count)
        event = RequestEvent(request_id, EventKind.FINISHED, count, str(reason), run.script.message)
        end_reason = 0 if reason is FinishReason.ABORT else int(run.end or 0)
        final = Final(reason, count, end_reason, run.script.message, run.script.num_cached, sum(logprobs), hypotheses)
        fields = final_fields(output[: 4 * count], START, final, pack_float32(logprobs))
        self._commit(
            TickEntry(self._next_tick(), (event,)), scripts.SetFields(self.keys.request(request_id), fields, 600)
        )

    def _next_tick(self) -> Tick:
        self._tick += 1
        return Tick(self._tick, self._intake_id, START, time.time())

    def _commit(self, entry: TickEntry, *more: scripts.Operation) -> None:
        operations = (scripts.XAdd(self.keys.steps, encode(entry)), *more)
        commit = scripts.TickCommit(self._epoch, self._tick, operations)
        assert scripts.commit_ticks(self._channel, self.keys, [commit]) == [scripts.AppendStatus.OK]


def _reason(run: _Run) -> FinishReason:
    if run.is_beam_search:
        return FinishReason.STOP
    if run.end is None:
        assert run.script.event is not None
        return run.script.event
    return {
        EndReason.EOS: FinishReason.STOP,
        EndReason.STOP_TOKEN: FinishReason.STOP,
        EndReason.LENGTH: FinishReason.LENGTH,
        EndReason.ERROR: FinishReason.ERROR,
    }[run.end]
