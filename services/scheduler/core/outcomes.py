"""What the core hands out."""

from dataclasses import dataclass

import msgspec

from shared.messages import Final, FinishReason, StepPlan, Submission, Tick, UsageRecord


@dataclass(frozen=True, slots=True)
class ScheduledPlan:
    """A plan and the worker incarnation it is for."""

    worker: str
    incarnation: int
    plan: StepPlan

    def with_tick(self, tick: Tick) -> "ScheduledPlan":
        return ScheduledPlan(self.worker, self.incarnation, msgspec.structs.replace(self.plan, tick=tick))


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's end, for its record. `output` is packed int32, `final.num_output_tokens` long."""

    request_id: str
    final: Final
    output: bytes
    logprobs: bytes = b""
    """Packed float32, one per token of `output`, if `params.with_logprobs`."""
    submission: Submission | None = None
    num_generated_tokens: int = 0
    """Committed tokens, those past a stop string included."""

    def usage(self, ended: float) -> UsageRecord:
        """What is to be accounted for. `ended`: Unix time, seconds."""
        submission, final = self.submission, self.final
        assert submission is not None
        found = final.hypotheses[: submission.params.num_hypotheses]
        return UsageRecord(
            request_id=self.request_id,
            tenant=submission.tenant,
            model=submission.model,
            created=submission.created,
            ended=ended,
            reason=final.reason,
            cause=final.message if final.reason in (FinishReason.ABORT, FinishReason.TIMEOUT) else "",
            num_prompt_tokens=len(submission.prompt_tokens) // 4,
            num_cached_tokens=final.num_cached_tokens,
            num_output_tokens=sum(len(h.tokens) // 4 for h in found) if found else final.num_output_tokens,
            num_generated_tokens=self.num_generated_tokens,
            group=submission.group,
            num_numerics_switches=final.num_numerics_switches,
        )


@dataclass(frozen=True, slots=True)
class LiveOutput:
    """Committed output of a live request; `seat` is (worker, incarnation, row, last answered step) if its row has
    yielded there."""

    request_id: str
    output: bytes
    seat: tuple[str, int, int, int] | None
    num_cached_tokens: int
    logprobs: bytes = b""
    """As in `Finished`."""
    fingerprint: str = ""
    """Numerics by which it was computed, if known."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters. Counters start at 0 with the core and survive in its snapshot."""

    num_running: int
    num_waiting: int
    num_workers: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    prefix_cache_queries: int
    """Tokens that requests had at their admissions."""
    prefix_cache_hits: int
    """Those of them that were cached."""
    num_forks: int
    """Choices that began with a sibling's prompt."""
    num_forked_blocks: int
    """Blocks that they shared at that time instead of computing and storing them again."""
    num_preemptions: int
    num_requeues: int
    num_handovers: int
    """Requests that left a draining worker for another one."""
    num_plans: int
    num_ignored_messages: int
    left_requests: int
    """Requests that left the waiting queue for the first time, by admission or by ending there."""
    left_tokens: int
    """Prompt tokens of those."""
    finished: tuple[tuple[str, int], ...]
    """(FinishReason, count)."""
    num_swapped: int
    """Requests whose KV lies in a host pool; neither running nor waiting."""
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    num_cached_cpu_blocks: int
    """Blocks of the host pools that hold evicted blocks for prefix hits."""
    num_swap_outs: int
    """Blocks that were copied to a host pool for requests that were preempted …"""
    num_swap_ins: int
    """… and such blocks whose requests came back."""
    num_demotions: int
    """Evicted blocks that were copied to a host pool …"""
    num_promotions: int
    """… and such blocks that were copied back on a hit."""
    num_numerics_switches: int
    """Times that a request went on at a worker with other numerics."""
