"""Answers that are made from final records: the best of several candidates, the results of a beam search.

Pure functions of the records, so every gateway gives the same answer, whatever it saw of the step log.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.output.output_function import OutputFunction
from services.gateway.text.tokenizer import TextTokenizer
from shared.errors import ProtocolError
from shared.messages import EndReason, Final, FinishReason, Hypothesis
from shared.packing import unpack_int32
from shared.records import RequestRecord

_NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete result."""

    text: str
    num_tokens: int
    """Output tokens that count."""
    finish_reason: str
    stop_reason: str | int | None = None


def end_reason_of(final: Final) -> EndReason | None:
    """The worker's ending; a record that ended by length may not name it."""
    if final.end_reason:
        return EndReason(final.end_reason)
    return EndReason.LENGTH if final.reason is FinishReason.LENGTH else None


def mean_logprob(record: RequestRecord, num_tokens: int) -> float:
    """Log-probability per token of the first `num_tokens` output tokens: those that count; −inf if there is none.

    A record without one per token has at least their sum.
    """
    logprobs = record.logprobs
    if num_tokens and len(logprobs) >= num_tokens:
        mean = math.fsum(logprobs[:num_tokens]) / num_tokens
    elif num_tokens and record.final is not None and record.final.num_output_tokens:
        mean = record.final.cumulative_logprob / record.final.num_output_tokens
    else:
        return -math.inf
    return mean if mean == mean else -math.inf


def ranked(scores: Sequence[float], n: int) -> list[int]:
    """Indices of the `n` highest scores, best first; of equal ones the lower index."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:n]


def best_answers(tokenizer: TextTokenizer, records: Sequence[RequestRecord]) -> list[Answer]:
    """Of the ended candidates of one prompt, in order, as many answers as were asked for, best first."""
    answers = [answer(tokenizer, record) for record in records]
    scores = [mean_logprob(record, a.num_tokens) for record, a in zip(records, answers, strict=True)]
    n = records[0].submission.params.num_hypotheses
    return [answers[index] for index in ranked(scores, n)]


def answer(tokenizer: TextTokenizer, record: RequestRecord) -> Answer:
    """E of an ended request."""
    final = record.final
    assert final is not None, "the request has not ended"
    output = OutputFunction(tokenizer, record.submission)
    return finished(output, record.output, end_reason_of(final), final.reason)


def hypotheses(tokenizer: TextTokenizer, record: RequestRecord) -> list[Answer]:
    """E of each result of an ended beam search, best first. One that was given up may lack some: those are empty.

    Raises:
        ProtocolError: it ended in order, but without a result: the pool does not know what a beam search is.
    """
    final = record.final
    assert final is not None, "the request has not ended"
    if not final.hypotheses and final.reason in _NATURAL:
        raise ProtocolError(f"beam search {record.submission.request_id} ended without a result")
    output = OutputFunction(tokenizer, record.submission)
    n = record.submission.params.num_hypotheses
    found = [_hypothesis(output, hypothesis, final.reason) for hypothesis in final.hypotheses[:n]]
    return found + [Answer("", 0, str(final.reason))] * (n - len(found))


def _hypothesis(output: OutputFunction, hypothesis: Hypothesis, reason: FinishReason) -> Answer:
    """One that no token ended was as long as it could be, unless the whole search was given up."""
    known = hypothesis.end_reason or (EndReason.LENGTH if reason in _NATURAL else 0)
    end_reason = EndReason(known) if known else None
    return finished(output, unpack_int32(hypothesis.tokens), end_reason, reason)


def finished(
    output: OutputFunction, tokens: Sequence[int], end_reason: EndReason | None, reason: FinishReason
) -> Answer:
    """E of `tokens` after their end. `reason` is told if neither a stop string nor `end_reason` ended them."""
    stream = output.start()
    delta = stream.feed(tokens, end_reason)
    if delta.finish_reason is not None:
        return Answer(delta.text, delta.num_tokens, str(delta.finish_reason), delta.stop_reason)
    return Answer(delta.text + stream.close().text, delta.num_tokens, str(reason))


def answers_of(tokenizer: TextTokenizer, records: Sequence[RequestRecord]) -> list[Answer]:
    """What one prompt's ended requests make: a beam search's results, or the best of its candidates."""
    if records[0].submission.params.beam_width:
        return hypotheses(tokenizer, records[0])
    return best_answers(tokenizer, records)
