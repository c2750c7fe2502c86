"""The engine: carries out plans on a persistent batch. infra/protocol.md, "Plans and steps", says what a plan means."""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.cache.host_pool import HostPool, allocate_pool
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine.batch import Batch, RowState
from services.gpu_worker.engine.beams import Beams
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.copies import BlockingCopier, Copier
from services.gpu_worker.engine.cuda_copies import CudaCopier
from services.gpu_worker.engine.endings import Endings
from services.gpu_worker.engine.graphs import graphs_for
from services.gpu_worker.engine.host_memory import keep_freed_memory
from services.gpu_worker.engine.inputs import StepInputs, build_inputs
from services.gpu_worker.engine.outcome import Outcome, nothing
from services.gpu_worker.engine.rates import Rates
from services.gpu_worker.engine.request_check import is_usable
from services.gpu_worker.engine.requirements import Limits
from services.gpu_worker.engine.validation import check_plan
from services.gpu_worker.engine.warm_up import warm_up_plans
from services.gpu_worker.models.model import ForwardInputs, Model
from services.gpu_worker.profile import Part, StepProfile
from services.gpu_worker.sampling.sampler import Sampled, Sampler, are_finite
from shared.errors import ConfigError
from shared.fault_points import FaultPoint, pass_point
from shared.messages import NewRow, StepPlan, StepResult
from shared.packing import unpack_int32

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")

ROSTER_INTERVAL = 64
"""Steps between two results that carry a full roster and the measured rates; the first step has rates too."""


class Engine:
    """One model on one device, one batch. Calls come from one thread.

    `begin` starts an incarnation with an empty batch; then `step` takes its plans in order, 1, 2, 3, …
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        config: EngineConfig,
        *,
        pool: HostPool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pool`: host memory for swapped and demoted blocks; none by default.

        Raises:
            ConfigError: rows may grow longer than the model's tables.
        """
        if config.max_model_len > model.num_positions:
            raise ConfigError(f"max_model_len {config.max_model_len}: the model has {model.num_positions} positions")
        self.model = model
        self.cache = cache
        self._k_cache = cache.layer(0)[0]
        self.config = config
        self.pool = pool if pool is not None else allocate_pool(cache, 0)
        self._clock = clock
        self._limits = Limits(
            num_blocks=cache.num_blocks,
            num_cpu_blocks=self.pool.num_blocks,
            block_size=cache.block_size,
            vocab_size=model.config.vocab_size,
            max_model_len=config.max_model_len,
        )
        self._graphs = graphs_for(model, cache, config)
        self._start_measuring()
        self.begin("", 0)

    def _start_measuring(self) -> None:
        self.profile = StepProfile()
        self._rates = Rates()
        self._copier = self._make_copier()

    def _make_copier(self) -> Copier:
        if self.model.device.type == "cuda":
            return CudaCopier(self.cache, self.pool, self._rates)
        return BlockingCopier(self.cache, self.pool, self._rates, self._clock)

    def begin(self, worker: str, incarnation: int) -> None:
        """Start an incarnation: forget every row, expect plan 1."""
        self._worker = worker
        self._incarnation = incarnation
        self.reset()

    def reset(self) -> None:
        """Forget every row. The next plan is 1."""
        rows, device = self.config.max_num_seqs, self.model.device
        eos, vocab_size = self.model.config.eos_token_ids, self.model.config.vocab_size
        max_blocks = -(-self.config.max_model_len // self.cache.block_size)
        self._next_plan = 1
        self._batch = Batch(rows, max_blocks, device)
        self._endings = Endings(rows, eos)
        self._sampler = Sampler(rows, vocab_size, eos, device)
        self._beams = Beams(self._batch, vocab_size, eos)

    def warm_up(self) -> None:
        """Run prefill and decode at the sizes that serving will see, so that no client waits for first-use costs.

        The batch must be empty; it is empty afterwards. What cache and host pool hold is overwritten.
        """
        keep_freed_memory()
        self.begin("", 0)
        self._run_warm_up_plans()
        if self._graphs is not None:
            self._graphs.record()
        # Once more: the first time has costs of its own, and the scheduler wants to know the speed from plan 1 on.
        self._start_measuring()
        self.reset()
        self._run_warm_up_plans()
        self._copier.measure()
        self.reset()

    def _run_warm_up_plans(self) -> None:
        for plan in warm_up_plans(self.config, self.cache, on_cpu=self.model.device.type == "cpu"):
            self.step(plan)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Carry out the next plan.

        Raises:
            ProtocolError: the plan is not the next one, or breaks a rule of the protocol. Nothing was changed.
        """
        checked = check_plan(plan, self._batch, expected_id=self._next_plan, limits=self._limits)
        self._next_plan += 1
        started = self._clock()
        parents = self._beams.read_parents(plan.beams)
        left = self._drop(plan.dropped)
        copying = self._copier.run(checked.copies)
        if checked.copies:
            pass_point(FaultPoint.BLOCKS_COPIED)
        for new in plan.added:
            self._add(new)
        beams = self._beams.make(plan.beams, parents)
        if len(checked.pairs):
            self._batch.tables.append(checked.pairs)
        inputs = build_inputs(self._batch, beams, plan.chunks, self._k_cache)
        if inputs is None:
            return self._result(plan, nothing(), left)
        self.profile.observe(Part.INPUT_BUILD, self._clock() - started - copying)
        self._copier.before_writes(inputs.written_slots // self.cache.block_size)
        outcome = self._compute(inputs, plan.chunks)
        self._await_device()
        seconds = self._clock() - started - copying
        self.profile.observe(Part.STEP, seconds)
        self._rates.record(inputs.num_chunked, inputs.num_single, seconds, inputs.num_pairs)
        return self._result(plan, outcome, left)

    def _drop(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Remove rows; answers those that readers of the log know. A row that had already ended is free: no news."""
        known = tuple(row for row in rows if self._batch.state[row] != RowState.FREE and self._batch.is_joined[row])
        for row in rows:
            if self._batch.state[row] != RowState.FREE:
                self._remove(row)
        return known

    def _remove(self, row: int) -> None:
        self._batch.remove(row)
        self._endings.remove(row)
        self._sampler.remove(row)
        self._beams.remove(row)

    def _add(self, new: NewRow) -> None:
        tokens = np.asarray(unpack_int32(new.tokens), np.int64)
        usable = is_usable(tokens, new.params, self.model.config.vocab_size)
        if not usable:
            # What is sound in it is computed as ever: others may be given its blocks until it ends.
            tokens = np.where((tokens >= 0) & (tokens < self.model.config.vocab_size), tokens, 0)
        self._batch.add(new.row, new.request_id, tokens, new.num_prompt_tokens, new.num_computed_tokens)
        self._batch.is_unusable[new.row] = not usable
        self._endings.add(new.row, new.params)
        if new.params.beam_width > 0:
            self._beams.enter(new.row, new.params)
        elif usable:
            self._sampler.add(new.row, new.params, tokens[: new.num_prompt_tokens], tokens[new.num_prompt_tokens :])
        else:
            self._sampler.add_greedy(new.row)

    def _compute(self, inputs: StepInputs, chunks: tuple[tuple[int, int], ...]) -> Outcome:
        """The forward pass, sampling and endings."""
        rows = inputs.sampled_rows
        runner = self._graphs if self._graphs is not None else self.model
        finish: Callable[[], Outcome]
        if self._is_greedy(rows):
            tokens, largest = self._timed(runner.forward_largest, inputs)
            finish = partial(self._take, Sampled(tokens, are_finite(largest)), rows, inputs.completed_rows)
        else:
            finish = partial(self._choose, self._timed(runner.forward, inputs), inputs)
        for row, size in chunks:
            self._batch.num_computed[row] += size
        started = self._clock()
        outcome = finish()
        self.profile.observe(Part.SAMPLING, self._clock() - started)
        return outcome

    def _is_greedy(self, rows: IntArray) -> bool:
        """Whether the largest logit of each row says all that the step is to yield."""
        return not self._batch.searches[rows].any() and self._sampler.is_greedy(rows, self._output_index(rows))

    def _timed(self, forward: Callable[[ForwardInputs, KVCache], T], inputs: StepInputs) -> T:
        """What a forward pass gives."""
        started = self._clock()
        result = forward(inputs.forward, self.cache)
        attention = self.model.attention_s
        self.profile.observe(Part.ATTENTION, attention)
        self.profile.observe(Part.GEMM, self._clock() - started - attention)
        return result

    def _await_device(self) -> None:
        """A pass that samples nothing is only queued so far: without this its time would be that of queueing."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def _choose(self, logits: torch.Tensor, inputs: StepInputs) -> Outcome:
        """A token for each row, candidates for each beam."""
        batch, rows = self._batch, inputs.sampled_rows
        searches = batch.searches[rows]
        if not searches.any():
            return self._sample(logits, rows, inputs.completed_rows)
        at = [torch.from_numpy(np.flatnonzero(places)).to(self.model.device) for places in (~searches, searches)]
        completed = inputs.completed_rows[~batch.searches[inputs.completed_rows]]
        outcome = self._sample(logits[at[0]], rows[~searches], completed)
        return self._search(logits[at[1]], rows[searches], outcome)

    def _output_index(self, rows: IntArray) -> IntArray:
        """Output tokens of each row so far."""
        return self._batch.num_tokens[rows] - self._batch.num_prompt[rows]

    def _sample(self, logits: torch.Tensor, rows: IntArray, completed: IntArray) -> Outcome:
        """A token for each of `rows`, of which `completed` are the last."""
        if not len(rows):
            return nothing()
        return self._take(self._sampler.sample(logits, rows, self._output_index(rows)), rows, completed)

    def _take(self, sampled: Sampled, rows: IntArray, completed: IntArray) -> Outcome:
        """Tokens of `rows`, of which `completed` are the last, become theirs."""
        if not len(rows):
            return nothing()
        batch, output_index = self._batch, self._output_index(rows)
        batch.last_token.index_copy_(0, torch.from_numpy(rows).to(self.model.device), sampled.tokens)
        # The one transfer to the host: tokens, with -1 where the logits were not finite.
        tokens = torch.where(sampled.ok, sampled.tokens, -1).cpu().numpy()
        ok = (tokens >= 0) & ~batch.is_unusable[rows]
        reasons = self._endings.find(rows, tokens, output_index, ok)
        outcome = Outcome(rows, tokens, output_index, ok, reasons)
        if sampled.logprobs is not None:
            asked = self._sampler.asked(rows)
            values = zip(rows[asked].tolist(), sampled.logprobs.cpu().tolist(), ok[asked].tolist(), strict=True)
            outcome.logprobs = tuple((row, logprob) for row, logprob, usable in values if usable)
        return self._advance(outcome, completed)

    def _search(self, logits: torch.Tensor, rows: IntArray, outcome: Outcome) -> Outcome:
        """Candidates for each of `rows`, beside what the others yielded."""
        outcome.beams = self._beams.advance(logits, rows)
        for row, _ in outcome.beams.ended:
            self._remove(row)
        return outcome

    def _advance(self, outcome: Outcome, completed: IntArray) -> Outcome:
        """Append the tokens to their rows and let ended rows go."""
        batch = self._batch
        first = outcome.output_index[len(outcome.rows) - len(completed) :]
        outcome.joined = self._named(completed, first)
        batch.num_tokens[outcome.rows] += 1
        batch.is_joined[completed] = True
        if len(completed):
            batch.start_decode(completed)
        for row, _ in outcome.ended:
            self._remove(row)
        return outcome

    def _result(self, plan: StepPlan, outcome: Outcome, left: tuple[int, ...]) -> StepResult:
        with_roster = plan.plan_id % ROSTER_INTERVAL == 0
        return StepResult(
            worker=self._worker,
            incarnation=self._incarnation,
            step_id=plan.plan_id,
            tokens=outcome.packed(),
            joined=outcome.joined,
            left=left,
            ended=outcome.ended + outcome.beams.ended,
            roster=self._roster() if with_roster else (),
            rates=self._rates.values if with_roster or plan.plan_id == 1 else (),
            traceparent=plan.traceparent,
            logprobs=outcome.logprobs,
            candidates=outcome.beams.candidates,
        )

    def _roster(self) -> tuple[tuple[int, str, int], ...]:
        """Every joined row with the output index of its next token."""
        batch = self._batch
        rows = np.flatnonzero((batch.state != RowState.FREE) & batch.is_joined)
        next_index = batch.num_tokens[rows] - batch.num_prompt[rows]
        return self._named(rows, next_index)

    def _named(self, rows: IntArray, index: IntArray) -> tuple[tuple[int, str, int], ...]:
        """(row, request_id, output index) of each of `rows`."""
        ids = self._batch.request_ids
        return tuple((row, ids[row], at) for row, at in zip(rows.tolist(), index.tolist(), strict=True))
