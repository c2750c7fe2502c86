"""Beam search without rows and blocks. That it equals Transformers' on a model is tested with the worker's engine."""

import pytest

from services.scheduler.core.beams import BeamSearch, Step, are_sound
from shared.messages import Candidates, EndReason
from shared.packing import pack_float32, pack_int32
from shared.sampling import SamplingParams


def search(width: int = 2, max_tokens: int = 10, **params: object) -> BeamSearch:
    return BeamSearch(SamplingParams(max_tokens=max_tokens, seed=0, beam_width=width, **params))  # type: ignore[arg-type]


def column(*pairs: tuple[int, float], row: int = 0) -> Candidates:
    """`-1 - token` for a token that ends."""
    tokens, values = zip(*pairs, strict=True)
    return Candidates(row, pack_int32(tokens), pack_float32(values))


def outputs(beam_search: BeamSearch) -> list[tuple[list[int], EndReason]]:
    return [(list(result.tokens), result.end_reason) for result in beam_search.best()]


def test_the_best_continuations_of_all_beams_go_on() -> None:
    beam_search = search(width=3)
    assert beam_search.advance([column((5, -1.0), (6, -2.0), (7, -3.0), (8, -4.0))]) == [(0, 5), (0, 6), (0, 7)]
    steps = beam_search.advance(
        [column((1, -3.0), (2, -5.0)), column((3, -0.5), (4, -1.5)), column((1, -9.0), (2, -9.5))]
    )
    assert steps == [Step(1, 3), Step(1, 4), Step(0, 1)]
    assert [(list(beam.tokens), beam.score) for beam in beam_search.beams] == [
        ([6, 3], -2.5),
        ([6, 4], -3.5),
        ([5, 1], -4.0),
    ]


def test_equal_sums_go_by_beam_and_then_by_token() -> None:
    beam_search = search(width=2)
    beam_search.advance([column((5, -1.0), (6, -1.0))])
    assert beam_search.advance([column((3, -1.0), (9, -1.0)), column((1, -1.0), (2, -1.0))]) == [(0, 3), (0, 9)]


def test_an_ending_counts_only_among_the_best_and_is_replaced_by_the_next_that_goes_on() -> None:
    beam_search = search(width=2)
    steps = beam_search.advance([column((5, -1.0), (-1 - 7, -2.0), (-1 - 8, -3.0), (6, -4.0))])
    assert steps == [(0, 5), (0, 6)]
    assert [list(result.tokens) for result in beam_search.results] == [[7]]


@pytest.mark.parametrize(("length_penalty", "is_over"), [(0.0, True), (1.0, False), (-1.0, True)])
def test_it_ends_when_no_beam_scores_better_than_the_worst_result(length_penalty: float, is_over: bool) -> None:
    """A result of one token with -1, one of two with -1.5; the best beam has -1.75 after two tokens."""
    beam_search = search(width=2, length_penalty=length_penalty)
    assert beam_search.advance([column((-1 - 7, -1.0), (5, -1.25), (6, -9.0))])
    steps = beam_search.advance([column((-1 - 7, -0.25), (1, -0.5), (2, -4.0)), column((1, -4.0), (2, -5.0))])
    assert len(beam_search.results) == 2
    assert (not steps) == is_over


def test_a_tie_with_the_worst_result_ends_it() -> None:
    beam_search = search(width=1, length_penalty=0.0)
    assert beam_search.advance([column((-1 - 3, -1.0), (5, -1.0))]) == []


def test_at_max_tokens_the_best_continuations_are_results_whether_they_end_or_not() -> None:
    beam_search = search(width=3, max_tokens=1, num_hypotheses=2, stop_token_ids=(7,))
    columns = [column((5, -1.0), (-1 - 7, -1.5), (-1 - 8, -2.0), (6, -4.0))]
    assert beam_search.advance(columns) == []
    assert outputs(beam_search) == [([5], EndReason.LENGTH), ([7], EndReason.STOP_TOKEN)]
    assert [(r.score, r.logprob, r.end_reason) for r in beam_search.results][2] == (-2.0, -2.0, EndReason.EOS)


def test_only_as_many_results_as_beams_are_kept_the_best() -> None:
    beam_search = search(width=2, num_hypotheses=2)
    beam_search.advance([column((-1 - 7, -1.0), (5, -1.25), (6, -9.0))])
    beam_search.advance([column((-1 - 9, -0.25), (-1 - 8, -0.5), (4, -3.0)), column((3, -7.0), (2, -8.0))])
    assert outputs(beam_search) == [([5, 9], EndReason.EOS), ([5, 8], EndReason.EOS)]
    assert [result.score for result in beam_search.results] == [-0.75, -0.875]


def test_fewer_continuations_than_beams_go_on_alone() -> None:
    beam_search = search(width=3)
    assert beam_search.advance([column((5, -1.0), (6, float("-inf")))]) == [(0, 5)]


@pytest.mark.parametrize(
    "wrong",
    [
        Candidates(0, b"", b""),
        Candidates(0, b"\1\2\3", b"\1\2\3"),
        Candidates(0, pack_int32([1, 2]), pack_float32([-1.0])),
        Candidates(0, pack_int32([1, 2]), pack_float32([-2.0, -1.0])),
        Candidates(0, pack_int32([1, 2]), pack_float32([-1.0, float("nan")])),
        Candidates(0, pack_int32([1]), pack_float32([float("nan")])),
        Candidates(0, pack_int32([1]), pack_float32([float("-inf")])),
        Candidates(0, pack_int32([1]), pack_float32([float("inf")])),
        Candidates(0, pack_int32([1, -2]), pack_float32([-1.0, -1.0])),
    ],
    ids=["none", "cut", "unpaired", "order", "nan", "only nan", "nothing follows", "infinite", "a token twice"],
)
def test_candidates_that_no_worker_can_mean_are_told_from_sound_ones(wrong: Candidates) -> None:
    assert not are_sound(wrong)
    assert are_sound(Candidates(0, pack_int32([1, -3]), pack_float32([-1.0, -1.0])))
