"""Answers from final records: ranking, endings, results of a beam search."""

import math
from array import array
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.gateway.output.answers import Answer, answers_of, mean_logprob, ranked
from services.gateway.text.detokenizer import BYTE_OF_CHARACTER
from services.gateway.text.model_files import ModelText
from services.gateway.text.tokenizer import TextTokenizer
from shared.messages import EndReason, Final, FinishReason, Hypothesis, Submission
from shared.packing import pack_int32
from shared.records import RequestRecord
from shared.sampling import SamplingParams
from tests.fakes.byte_model import EOS, spell


def make_tokenizer() -> TextTokenizer:
    """Tokens are bytes."""
    inner = Tokenizer(models.BPE(dict(BYTE_OF_CHARACTER), []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return TextTokenizer(inner, ModelText(EOS + 1, 512, (EOS,), {}))


TOKENIZER = make_tokenizer()


def record(
    output: Sequence[int],
    logprobs: Sequence[float] = (),
    *,
    reason: FinishReason = FinishReason.STOP,
    end: int = 0,
    cumulative: float = 0.0,
    stop: tuple[str, ...] = (),
    hypotheses: tuple[Hypothesis, ...] = (),
    **params: float,
) -> RequestRecord:
    wanted = SamplingParams(max_tokens=100, seed=1, **params)  # type: ignore[arg-type]
    submission = Submission("r", "m", "completion", 1.0, pack_int32([ord("p")]), wanted, stop=stop)
    final = Final(reason, len(output), end, cumulative_logprob=cumulative, hypotheses=hypotheses)
    return RequestRecord(submission, array("i", output), "0-0", None, final, 0, array("f", logprobs))


def candidate(text: str, *logprobs: float, **options: object) -> RequestRecord:
    """Ends with EOS."""
    return record(
        [*spell(text), EOS],
        logprobs,
        end=EndReason.EOS,
        with_logprobs=True,
        num_hypotheses=2,
        **options,  # type: ignore[arg-type]
    )


def test_the_highest_logprob_per_token_is_best_not_the_highest_sum() -> None:
    long, short = candidate("aaaa", -1, -1, -1, -1, -1), candidate("b", -2, -2)
    assert [a.text for a in answers_of(TOKENIZER, [short, long])] == ["aaaa", "b"]


def test_equal_candidates_keep_their_order() -> None:
    same = [candidate(name, -1, -1) for name in "abc"]
    assert [a.text for a in answers_of(TOKENIZER, same)] == ["a", "b"]
    assert ranked([0.0, 1.0, 1.0, 0.5], 3) == [1, 2, 3]


def test_tokens_past_a_stop_string_count_neither_in_text_nor_in_score() -> None:
    """The stop string completed, but the request had ended at the worker before the scheduler heard of it."""
    stopped = candidate("aX very bad", *[-1.0] * 2, *[-50.0] * 10, stop=("X",))
    other = candidate("b", -2, -2)
    first, second = answers_of(TOKENIZER, [other, stopped])
    assert first == Answer("a", 2, "stop", "X")
    assert (second.text, second.num_tokens) == ("b", 2)
    assert mean_logprob(stopped, 2) == -1.0


def test_a_record_with_the_sum_alone_is_ranked_by_it() -> None:
    assert mean_logprob(candidate("abc", cumulative=-8.0), 4) == -2.0


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_scores_that_are_no_numbers_come_last(broken: float) -> None:
    ranking = [candidate("a", broken, -1), candidate("b", -9, -9), candidate("c", -8, -8)]
    assert [a.text for a in answers_of(TOKENIZER, ranking)] == ["c", "b"]
    assert mean_logprob(record([], with_logprobs=True), 0) == -math.inf


def test_a_candidate_that_was_given_up_shows_what_it_held() -> None:
    aborted = record(
        spell("abX"), [-1.0] * 3, reason=FinishReason.ABORT, stop=("XY",), with_logprobs=True, num_hypotheses=1
    )
    assert answers_of(TOKENIZER, [aborted]) == [Answer("abX", 3, "abort")]


def test_every_result_of_a_beam_search_goes_through_the_output_function() -> None:
    found = (
        Hypothesis(pack_int32([*spell("to be"), EOS]), -0.5, EndReason.EOS),
        Hypothesis(pack_int32(spell("to X or not")), -0.6, EndReason.LENGTH),
        Hypothesis(pack_int32(spell("to b")), -0.7, EndReason.STOP_TOKEN),
        Hypothesis(pack_int32(spell("long")), -0.8),
    )
    ended = record(spell("to be"), stop=("X",), hypotheses=found, beam_width=4, num_hypotheses=4)
    assert answers_of(TOKENIZER, [ended]) == [
        Answer("to be", 6, "stop"),
        Answer("to ", 4, "stop", "X"),
        Answer("to ", 4, "stop", ord("b")),
        Answer("long", 4, "length"),
    ]


def test_a_search_has_as_many_results_as_were_asked_for() -> None:
    found = tuple(Hypothesis(pack_int32([*spell(name), EOS]), -0.5, EndReason.EOS) for name in "abc")
    ended = record(spell("a"), hypotheses=found, beam_width=4, num_hypotheses=2)
    assert [a.text for a in answers_of(TOKENIZER, [ended])] == ["a", "b"]
    given_up = record([], reason=FinishReason.ABORT, hypotheses=found[:1], beam_width=4, num_hypotheses=3)
    assert [(a.text, a.finish_reason) for a in answers_of(TOKENIZER, [given_up])] == [
        ("a", "stop"),
        ("", "abort"),
        ("", "abort"),
    ]
