"""Every parameter against its definition; draws against the distribution they should follow."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling.api import sample
from kernels.sampling.filters import cutoffs
from kernels.sampling.race import FAN_OUT, num_levels, race
from services.gpu_worker.sampling import sampler as sampling
from services.gpu_worker.sampling.philox import exponentials
from services.gpu_worker.sampling.sampler import Sampler
from shared.sampling import SamplingParams
from tests.fakes.naive_sampling import distribution, processed_logits

VOCAB_SIZE = 700
EOS = (2, 5)
NO_TOKENS = np.zeros(0, np.int64)


def logits_of(seed: int, vocab_size: int = VOCAB_SIZE, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def sampler(num_rows: int = 4, vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(num_rows, vocab_size, EOS, torch.device("cpu"))


def sample_one(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> int:
    """The token of a single row whose history is given."""
    one, output = sampler(1, len(logits)), output or []
    one.add(0, params, np.array(prompt or [], np.int64), np.array(output, np.int64))
    return int(one.sample(logits[None].clone(), np.array([0]), np.array([len(output)])).tokens[0])


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """`count` draws of one row at output indices 0, 1, 2, …: [count]."""
    many = sampler(count, len(logits))
    for row in range(count):
        many.add(row, params, NO_TOKENS, NO_TOKENS)
    # Each row stands at another output index of the same request.
    return many.sample(logits.repeat(count, 1), np.arange(count), np.arange(count)).tokens.numpy()


PROMPT = [3, 4, 4, 9, 600]
OUTPUT = [9, 17, 17, 17, 44]
DETERMINISTIC: dict[str, dict] = {
    "plain": {},
    "logit_bias": {"logit_bias": ((44, 30.0), (45, -30.0), (699, 5.0))},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 2.0},
    "negative frequency": {"frequency_penalty": -2.0},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (17, 44)},
    "min_tokens with ignore_eos": {"min_tokens": 6, "stop_token_ids": (17,), "ignore_eos": True},
    "all": {
        "logit_bias": ((2, 50.0), (17, 4.0)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "min_tokens": 9,
        "stop_token_ids": (17,),
    },
}


@pytest.mark.parametrize("case", DETERMINISTIC)
def test_greedy_takes_the_largest_changed_logit(case: str) -> None:
    params = SamplingParams(max_tokens=50, seed=0, temperature=0.0, **DETERMINISTIC[case])
    for seed in range(30):
        logits = logits_of(seed)
        logits[list({*PROMPT, *OUTPUT, *EOS})] += 4.0  # what the parameters act on competes for the first place
        expected = processed_logits(logits.numpy(), params, PROMPT, OUTPUT, EOS).argmax()
        assert sample_one(logits, params, PROMPT, OUTPUT) == expected


def test_temperature_below_the_bound_is_greedy() -> None:
    logits = logits_of(1)
    assert sample_one(logits, SamplingParams(max_tokens=9, seed=3, temperature=1e-9)) == logits.argmax()


def test_smallest_sampled_temperature_does_not_overflow() -> None:
    logits = logits_of(1) * 1000
    assert sample_one(logits, SamplingParams(max_tokens=9, seed=3, temperature=1.1e-5)) == logits.argmax()


FILTERS: dict[str, dict] = {
    "top_k 1": {"top_k": 1},
    "top_k 40": {"top_k": 40},
    "top_k over the candidates": {"top_k": 400},
    "top_k over the vocabulary": {"top_k": 10**9},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-6},
    "top_p over the candidates": {"top_p": 0.97, "temperature": 2.0},
    "min_p": {"min_p": 0.05},
    "min_p one": {"min_p": 1.0},
    "top_k then top_p": {"top_k": 30, "top_p": 0.9},
    "wide top_k then top_p": {"top_k": 500, "top_p": 0.99, "temperature": 2.0},
    "wide min_p then top_p": {"min_p": 0.2, "top_p": 0.3, "temperature": 2.0},
    "all": {"top_k": 25, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
}


@pytest.mark.parametrize("case", FILTERS)
def test_filters_keep_exactly_the_tokens_of_their_definition(case: str) -> None:
    params = SamplingParams(max_tokens=9, seed=0, **FILTERS[case])
    for seed in range(20):
        logits = logits_of(seed, spread=1.0 if "candidates" in case or "wide" in case else 3.0)
        expected = distribution(logits.numpy().astype(np.float64), params) > 0
        scaled = (logits / params.temperature)[None]
        columns = (torch.tensor([params.top_k]), torch.tensor([params.top_p]), torch.tensor([params.min_p]))
        kept = scaled >= cutoffs(scaled, *columns)[:, None]
        assert np.array_equal(kept[0].numpy(), expected), f"{int(kept.sum())} kept, {expected.sum()} expected"


@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.999])
def test_nuclei_of_every_size_in_a_large_vocabulary(top_p: float) -> None:
    """Some are found among the first candidates, some among more, some need a sorted row."""
    logits = torch.stack([logits_of(seed, 9000, spread) for seed, spread in enumerate((8.0, 1.5, 0.5))])
    params = SamplingParams(max_tokens=9, seed=0, top_p=top_p)
    one = torch.ones(3)
    kept = logits >= cutoffs(logits, torch.zeros(3, dtype=torch.int64), one * top_p, 0 * one)[:, None]
    sizes = []
    for row in range(3):
        expected = distribution(logits[row].numpy().astype(np.float64), params) > 0
        sizes.append(int(expected.sum()))
        assert abs(int(kept[row].sum()) - sizes[-1]) <= 1, "float32 may see the last token on the other side"
    assert sizes == sorted(sizes)
    if top_p == 0.5:
        assert sizes[0] < 256 < sizes[1] < sizes[2]
    if top_p == 0.999:
        assert sizes[0] < 4096 < sizes[1]


def test_equal_logits_are_kept_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0])[None]
    one = torch.ones(1)
    assert cutoffs(logits, torch.tensor([3]), one, 0 * one) == 2.0
    assert cutoffs(logits, torch.tensor([2]), one, 0 * one) == 3.0


def test_rows_of_a_batch_are_filtered_each_by_its_own_parameters() -> None:
    many = sampler(len(FILTERS))
    logits = torch.stack([logits_of(seed) for seed in range(len(FILTERS))])
    for row, changes in enumerate(FILTERS.values()):
        many.add(row, SamplingParams(max_tokens=9, seed=row, **changes), NO_TOKENS, NO_TOKENS)
    together = many.sample(logits.clone(), np.arange(len(FILTERS)), np.full(len(FILTERS), 3)).tokens.tolist()
    for row, changes in enumerate(FILTERS.values()):
        one = sampler(1)
        one.add(0, SamplingParams(max_tokens=9, seed=row, **changes), NO_TOKENS, NO_TOKENS)
        assert one.sample(logits[row : row + 1].clone(), np.array([0]), np.array([3])).tokens.tolist() == [
            together[row]
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 8},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.4},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(changes: dict) -> None:
    """Chi-square over the tokens of a small vocabulary, with a fixed seed; the bound is the 99.9 % quantile."""
    count, vocab_size = 6000, 60
    logits = logits_of(5, vocab_size, spread=1.5)
    params = SamplingParams(max_tokens=9, seed=11, **changes)
    expected = distribution(logits.numpy().astype(np.float64), params) * count
    observed = np.bincount(draw_many(logits, params, count), minlength=vocab_size)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    rare_expected, rare_observed = expected[~common].sum(), observed[~common].sum()
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    if rare_expected > 0:
        chi_square += (rare_observed - rare_expected) ** 2 / rare_expected
    freedom = common.sum() - (rare_expected == 0)
    assert chi_square < freedom + 3.1 * math.sqrt(2 * freedom) + 8, (
        f"{chi_square:.1f} with {freedom} degrees of freedom"
    )


def test_draws_depend_on_seed_choice_and_index_but_not_on_the_batch() -> None:
    logits = logits_of(8, spread=0.5)
    many = sampler(4)
    rows = [(5, 0, 7), (6, 0, 7), (5, 1, 7), (5, 0, 8)]
    for row, (seed, choice, _) in enumerate(rows):
        many.add(row, SamplingParams(max_tokens=9, seed=seed, choice=choice), NO_TOKENS, NO_TOKENS)
    index = np.array([index for _, _, index in rows])
    together = many.sample(logits.repeat(4, 1), np.arange(4), index).tokens.tolist()
    backwards = many.sample(logits.repeat(4, 1), np.array([3, 2, 1, 0]), index[::-1].copy()).tokens.tolist()
    assert together == backwards[::-1]
    assert len(set(together)) == 4
    assert many.sample(logits[None].clone(), np.array([0]), np.array([7])).tokens.tolist() == together[:1]


def test_penalty_counts_follow_the_sampled_tokens() -> None:
    """Eight steps of one row; the definition is given the tokens that came out so far."""
    params = SamplingParams(max_tokens=50, seed=0, temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.1)
    one = sampler(1)
    output: list[int] = []
    one.add(0, params, np.array(PROMPT), NO_TOKENS)
    logits = logits_of(3)
    for index in range(8):
        expected = processed_logits(logits.numpy(), params, PROMPT, output).argmax()
        output += one.sample(logits[None].clone(), np.array([0]), np.array([index])).tokens.tolist()
        assert output[-1] == expected
    assert len(set(output)) > 1


def test_a_row_that_returns_has_the_counts_it_left_with() -> None:
    params = SamplingParams(max_tokens=50, seed=0, temperature=0.0, presence_penalty=1.5, repetition_penalty=1.3)
    logits = [logits_of(seed) for seed in range(6)]

    def run(*, returns: bool) -> list[int]:
        some = sampler(3)
        output: list[int] = []
        some.add(0, params, np.array(PROMPT), NO_TOKENS)
        for index, row_logits in enumerate(logits):
            if returns and index == 3:
                some.remove(0)
                some.add(1, params, np.array([8]), np.array([9]))  # takes the place that the row had
                some.add(0, params, np.array(PROMPT), np.array(output))
            output += some.sample(row_logits[None].clone(), np.array([0]), np.array([index])).tokens.tolist()
        return output

    assert run(returns=True) == run(returns=False)


def test_a_row_knows_nothing_of_the_one_before_it() -> None:
    params = SamplingParams(max_tokens=50, seed=0, temperature=0.0, repetition_penalty=5.0, presence_penalty=2.0)
    logits = logits_of(3)
    best = int(logits.argmax())
    one = sampler(1)
    one.add(0, params, np.array([best]), np.array([best]))
    assert one.sample(logits[None].clone(), np.array([0]), np.array([1])).tokens.tolist() != [best]
    one.remove(0)
    one.add(0, params, np.array([1]), NO_TOKENS)
    assert one.sample(logits[None].clone(), np.array([0]), np.array([0])).tokens.tolist() == [best]


def test_counts_of_many_rows_do_not_mix() -> None:
    params = SamplingParams(max_tokens=50, seed=0, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    many = sampler(11)
    outputs: list[list[int]] = [[] for _ in range(11)]
    for row in range(11):
        many.add(row, params, NO_TOKENS, NO_TOKENS)
    for index in range(5):
        logits = torch.stack([logits_of(row) for row in range(11)])
        expected = [processed_logits(logits[row].numpy(), params, [], outputs[row]).argmax() for row in range(11)]
        tokens = many.sample(logits, np.arange(11), np.full(11, index)).tokens.tolist()
        assert tokens == expected
        for row, token in enumerate(tokens):
            outputs[row].append(token)


@pytest.mark.parametrize("num_drawn", [3, 2])
def test_rows_are_drawn_from_where_their_logits_lie(num_drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a step are many megabytes: nobody copies them to draw from all rows or from some."""
    places: list[int] = []

    def record(logits: torch.Tensor, **parameters: Any) -> torch.Tensor:
        places.append(logits.data_ptr())
        return sample(logits, **parameters)

    monkeypatch.setattr(sampling, "sample", record)
    three = sampler(3)
    for row in range(3):
        temperature = 1.0 if row < num_drawn else 0.0
        three.add(row, SamplingParams(max_tokens=9, seed=4, temperature=temperature), NO_TOKENS, NO_TOKENS)
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    three.sample(logits, np.arange(3), np.zeros(3, np.int64))
    assert places == [logits.data_ptr()]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_p": 0.9, "presence_penalty": 1.0}], ids=str)
def test_logits_that_are_not_finite_are_reported_for_their_row_only(poison: float, changes: dict) -> None:
    params = SamplingParams(max_tokens=9, seed=4, **changes)
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    clean, poisoned = sampler(3), sampler(3)
    for row in range(3):
        clean.add(row, params, NO_TOKENS, NO_TOKENS)
        poisoned.add(row, params, NO_TOKENS, NO_TOKENS)
    expected = clean.sample(logits.clone(), np.arange(3), np.zeros(3, np.int64))
    logits[1, 77] = poison
    actual = poisoned.sample(logits, np.arange(3), np.zeros(3, np.int64))
    assert expected.ok.all()
    assert actual.ok.tolist() == [True, False, True]
    assert actual.tokens[[0, 2]].tolist() == expected.tokens[[0, 2]].tolist()
    assert 0 <= int(actual.tokens[1]) < VOCAB_SIZE


def times_of(count: int, vocab_size: int) -> torch.Tensor:
    """Of draws at output indices 0, 1, 2, …"""
    zeros = np.zeros(count, np.int64)
    times = exponentials(zeros + 3, zeros, np.arange(count), num_levels(vocab_size) * FAN_OUT)
    return torch.from_numpy(times).view(count, -1, FAN_OUT)


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 700, 4097])
def test_a_race_is_won_level_by_level_by_the_one_that_arrives_first(vocab_size: int) -> None:
    weights = torch.rand(50, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    weights[weights < 0.3] = 0.0
    weights[0, : vocab_size // 2] = 0.0
    weights[:, vocab_size // 2] += 0.5
    times = times_of(50, vocab_size)
    drawn = race(weights, times).tolist()
    for row, token in enumerate(drawn):
        tokens = range(vocab_size)
        for level in range(times.shape[1]):
            width = FAN_OUT ** (times.shape[1] - 1 - level)
            groups = [tokens[at : at + width] for at in range(0, len(tokens), width)]
            sums = [weights[row, group.start : group.stop].sum().item() for group in groups]
            arrivals = [times[row, level, k].item() / total if total else math.inf for k, total in enumerate(sums)]
            tokens = groups[arrivals.index(min(arrivals))]
        assert [token] == list(tokens)
        assert weights[row, token] > 0


def test_races_over_three_levels_follow_the_weights() -> None:
    """Chi-square as above; the tokens of weight stand in different branches of the tree, and beside each other."""
    count, vocab_size = 8000, 64 * 64 + 40
    weights = torch.zeros(vocab_size)
    places = [0, 1, 63, 64, 700, 701, 4095, 4096, 4097, vocab_size - 1]
    weights[places] = torch.tensor([1.0, 8, 3, 2, 5, 1, 4, 2, 6, 8])
    times = times_of(count, vocab_size)
    drawn = torch.cat([race(weights.repeat(500, 1), some) for some in times.split(500)])
    observed = np.bincount(drawn.numpy(), minlength=vocab_size)
    expected = (weights / weights.sum()).numpy() * count
    assert observed.sum() == observed[places].sum() == count
    chi_square = ((observed - expected)[places] ** 2 / expected[places]).sum()
    assert chi_square < 27.9, "99.9 % of a chi-square with 9 degrees of freedom"


def test_a_draw_hardly_ever_changes_with_the_last_bits_of_the_logits() -> None:
    """A request in another batch, or computed anew after a preemption, has logits that differ in their last bits; here
    by a thousand times as much, so that it shows.

    Draws by inverting the cumulative sum, as they were once, differ here in 1,125 of 4,000: an error in any weight
    moves the boundaries of all tokens after it. So a sampled text was now and then another one than alone.
    """
    count, vocab_size, error = 4000, 5000, 1e-2
    generator = torch.Generator().manual_seed(1)
    times = times_of(count, vocab_size)
    changed = 0
    for some in times.split(500):
        logits = torch.randn(500, vocab_size, generator=generator)
        noisy = logits + error * torch.randn(500, vocab_size, generator=generator)
        changed += int((race(logits.exp(), some) != race(noisy.exp(), some)).sum())
    assert 0 < changed < count * error, "this error is large enough to be seen"
