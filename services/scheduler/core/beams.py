"""Beam search, without rows and blocks: from what may follow each beam to the beams that go on and the results.

With `num_beams = B` and a sum of log-probabilities per beam, every step looks at all continuations of all beams, best
sum first:

    rank   0 … B-1                B …
    ends   result                 nothing: only the B best continuations may become results
    goes   beam, the first B of those that go on, whatever their rank

A result's score is its sum over `length ** length_penalty`, the length being its output tokens; the B best results are
kept. The search ends at `max_tokens`, where everything ends, or when there are B results and the best beam's sum,
scored as if it ended at its present length, is not better than the worst of them. These are the rules of Transformers'
`generate(num_beams=B, do_sample=False, early_stopping=False)`, whose results are the same if log-probabilities are.
Equal sums go by beam, then by token.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple

from shared.messages import Candidates, EndReason, Hypothesis
from shared.packing import pack_int32, unpack_float32, unpack_int32
from shared.sampling import SamplingParams

MAX_LENGTH_PENALTY = 32.0
"""More, either way, and the power of a long output's length leaves the numbers."""


@dataclass(slots=True)
class Beam:
    """A sequence that goes on: its output so far and the sum of its log-probabilities."""

    tokens: "array[int]"
    score: float


@dataclass(slots=True)
class Result:
    """A sequence that ended: the sum of its log-probabilities, and its score, which is that over its length."""

    tokens: "array[int]"
    logprob: float
    score: float
    end_reason: EndReason

    def as_hypothesis(self) -> Hypothesis:
        return Hypothesis(pack_int32(self.tokens), self.score, int(self.end_reason))


class Step(NamedTuple):
    """A beam of the next step: that of index `parent` of this one, then `token`."""

    parent: int
    token: int


class _Continuation(NamedTuple):
    """Smaller is better."""

    negative_score: float
    parent: int
    token: int
    ends: bool


def _first_beam() -> list[Beam]:
    return [Beam(array("i"), 0.0)]


@dataclass(slots=True)
class BeamSearch:
    """The state of one search."""

    params: SamplingParams
    beams: list[Beam] = field(default_factory=_first_beam)
    results: list[Result] = field(default_factory=list)
    """Best first."""

    @property
    def num_tokens(self) -> int:
        """Output tokens of every beam."""
        return len(self.beams[0].tokens)

    def advance(self, candidates: Sequence[Candidates]) -> list[Step]:
        """Take what may follow each beam, in the order of `beams`, and go on; the new beams, none when it is over."""
        width = self.params.beam_width
        is_last = self.num_tokens + 1 >= self.params.max_tokens
        going: list[_Continuation] = []
        for rank, continuation in enumerate(sorted(self._continuations(candidates))):
            if not (continuation.ends or is_last):
                going.append(continuation)
            elif rank < width:
                self._add_result(continuation)
            if rank >= width - 1 and len(going) >= width:
                break
        going = going[:width]
        self._keep_best()
        if self._is_over(going):
            return []
        self.beams = [Beam(self._tokens(each), -each.negative_score) for each in going]
        return [Step(each.parent, each.token) for each in going]

    def best(self) -> list[Result]:
        """The results that were asked for."""
        return self.results[: max(1, self.params.num_hypotheses)]

    def _continuations(self, candidates: Sequence[Candidates]) -> "list[_Continuation]":
        return [
            _Continuation(-(beam.score + logprob), parent, *_decode(token))
            for parent, (beam, column) in enumerate(zip(self.beams, candidates, strict=True))
            for token, logprob in zip(unpack_int32(column.tokens), unpack_float32(column.logprobs), strict=True)
            if logprob > -inf
        ]

    def _tokens(self, continuation: _Continuation) -> "array[int]":
        return self.beams[continuation.parent].tokens + array("i", [continuation.token])

    def _add_result(self, continuation: _Continuation) -> None:
        logprob = -continuation.negative_score
        if not continuation.ends:
            reason = EndReason.LENGTH
        else:
            reason = EndReason.STOP_TOKEN if continuation.token in self.params.stop_token_ids else EndReason.EOS
        self.results.append(Result(self._tokens(continuation), logprob, self._normalised(logprob), reason))

    def _keep_best(self) -> None:
        self.results.sort(key=lambda result: -result.score)  # stable: of equal ones the earlier goes first
        del self.results[self.params.beam_width :]

    def _is_over(self, going: list[_Continuation]) -> bool:
        if not going:
            return True
        if len(self.results) < self.params.beam_width:
            return False
        return self._normalised(-going[0].negative_score) <= self.results[-1].score

    def _normalised(self, score: float) -> float:
        """The score of a sequence that is one token longer than the beams."""
        return float(score / (self.num_tokens + 1) ** self.params.length_penalty)


def _decode(token: int) -> tuple[int, bool]:
    """(token, whether it ends the sequence)."""
    return (token, False) if token >= 0 else (-1 - token, True)


def are_sound(candidates: Candidates) -> bool:
    """Whether they can be what follows a beam: something can follow, tokens and numbers pair up, best first."""
    num_tokens = len(candidates.tokens) // 4
    if not num_tokens or len(candidates.tokens) % 4 or len(candidates.logprobs) != len(candidates.tokens):
        return False
    values = unpack_float32(candidates.logprobs)
    in_order = all(before >= after for before, after in zip(values, islice(values, 1, None), strict=False))
    tokens = {_decode(token)[0] for token in unpack_int32(candidates.tokens)}
    return -inf < values[0] < inf and in_order and len(tokens) == num_tokens
