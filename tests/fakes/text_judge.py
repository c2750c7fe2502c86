"""Is what a request ended with the text that it would have had alone?"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.core.outcomes import Finished
from shared.messages import FINISH_REASONS, EndReason, FinishReason, RequestEvent, Submission
from shared.packing import unpack_float32, unpack_int32
from tests.fakes.content_worker import reference_beams, reference_logprob, reference_output


@dataclass(slots=True)
class Reader:
    """What a gateway has of one request."""

    tokens: list[int] = field(default_factory=list)
    terminal: RequestEvent | None = None
    stops: list[int] = field(default_factory=list)
    """Where stop strings completed."""


@dataclass(frozen=True, slots=True)
class TextJudge:
    """Compares ends with references."""

    records: Mapping[str, Submission]
    readers: Mapping[str, Reader]
    counts: Counter[str]
    """`beam searches` that came to their end, `logprobs` of tokens."""

    def event(self, event: RequestEvent) -> None:
        """A request ends, as readers of the log are told."""
        reader = self.readers[event.request_id]
        if self.records[event.request_id].params.beam_width:
            assert not reader.tokens, "a token of a beam search in the log"
            return  # its final record is judged
        reference, ending = reference_output(self.records[event.request_id])
        told = reader.tokens[: event.num_output_tokens]
        assert len(told) == event.num_output_tokens and told == reference[: len(told)], "not the text it would have had"
        if event.reason in (FinishReason.LENGTH, FinishReason.STOP) and event.num_output_tokens not in reader.stops:
            assert told == reference, "ended early"
            assert (event.reason == FinishReason.LENGTH) == (ending.name == "LENGTH")

    def final(self, end: Finished) -> None:
        """What its record will say."""
        if self.records[end.request_id].params.beam_width:
            self._search(end)
            return
        told = self.readers[end.request_id].tokens[: end.final.num_output_tokens]
        assert list(unpack_int32(end.output)) == told
        self._logprobs(end)

    def _search(self, end: Finished) -> None:
        found = [
            (list(unpack_int32(text.tokens)), text.score, EndReason(text.end_reason)) for text in end.final.hypotheses
        ]
        if end.final.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            assert not found and not end.output
            return
        submission = self.records[end.request_id]
        assert found == reference_beams(submission), "not the texts that the search would have found alone"
        best, _, reason = found[0]
        assert list(unpack_int32(end.output)) == best and end.final.end_reason == reason
        assert end.final.reason is FINISH_REASONS[reason] and end.final.num_output_tokens == len(best)
        assert end.final.cumulative_logprob == reference_logprob(submission, best)
        self.counts["beam searches"] += 1

    def _logprobs(self, end: Finished) -> None:
        submission, output = self.records[end.request_id], unpack_int32(end.output)
        if submission.params.with_logprobs:
            assert end.final.cumulative_logprob == reference_logprob(submission, output), "not the tokens' probability"
            assert sum(unpack_float32(end.logprobs)) == end.final.cumulative_logprob
            self.counts["logprobs"] += len(output)
        else:
            assert not end.final.cumulative_logprob and not end.logprobs
