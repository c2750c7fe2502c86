"""Sampling by the C++ kernel, and by torch, against its definition: sorted, in float64."""

import numpy as np
import pytest
import torch

from kernels.native.library import Library, built_levels, using
from kernels.sampling import api, reference
from kernels.sampling.native import sample
from kernels.sampling.race import FAN_OUT, num_levels

FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (50, 1.0, 0.0),
    (3000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.001, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.05),
    (40, 0.8, 0.01),
    (2000, 0.99, 0.0),
]
"""top_k, top_p, min_p."""


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Weights, 0 for tokens that a filter drops: min_p, then top_k, then top_p on the rest; equals stay together."""
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)
    weights[weights < min_p] = 0
    if 0 < top_k < len(weights):
        weights[scaled < np.sort(scaled)[-top_k]] = 0
    if top_p < 1:
        ordered = np.sort(weights)[::-1]
        before = np.cumsum(ordered) - ordered
        wanted = max(1, int((before < top_p * weights.sum()).sum()))
        weights[weights < ordered[wanted - 1]] = 0
    return weights


def winner(weights: np.ndarray, times: np.ndarray) -> int:
    """Race down the tree; times: [levels, FAN_OUT]."""
    levels = [weights]
    for _ in range(len(times) - 1):
        padded = np.pad(levels[-1], (0, -len(levels[-1]) % FAN_OUT))
        levels.append(padded.reshape(-1, FAN_OUT).sum(1))
    node = 0
    for sums, level_times in zip(reversed(levels), times, strict=True):
        family = np.pad(sums, (0, -len(sums) % FAN_OUT))[node * FAN_OUT : (node + 1) * FAN_OUT]
        node = node * FAN_OUT + int((family / level_times).argmax())
    return node


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 65, 4096, 4097, 49152])
def test_tokens_are_those_of_the_definition(
    vocab_size: int, filters: tuple[int, float, float], native: Library
) -> None:
    random = np.random.default_rng(vocab_size)
    num_rows = 24
    logits = torch.from_numpy(random.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
    logits[1::3] = logits[1::3].round()  # ties
    logits[2::3, vocab_size // 2 :] = -torch.inf
    logits[2::3, 0] = 0.0
    temperature = torch.from_numpy(random.choice([0.01, 0.7, 1.0, 1.8], num_rows).astype(np.float32))
    times = torch.from_numpy(random.exponential(size=(num_rows, num_levels(vocab_size), FAN_OUT)))
    columns = (
        torch.full((num_rows,), filters[0]),
        torch.full((num_rows,), filters[1]),
        torch.full((num_rows,), filters[2]),
    )
    actual = sample(native, logits, temperature, *columns, times)
    for row in range(num_rows):
        weights = kept(logits[row].double().numpy(), float(temperature[row]), *filters)
        assert actual[row] == winner(weights, times[row].numpy()), f"row {row}"
    if vocab_size < 5000:
        assert torch.equal(reference.sample(logits, temperature, *columns, times), actual)


def test_rows_of_different_filters_and_a_stride(native: Library) -> None:
    random = np.random.default_rng(0)
    num_rows, vocab_size = 3 * len(FILTERS), 3000
    wide = torch.from_numpy(random.normal(0, 2, (num_rows, vocab_size + 40)).astype(np.float32))
    logits = wide[:, :vocab_size]
    chosen = [FILTERS[row % len(FILTERS)] for row in range(num_rows)]
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*chosen, strict=True))
    times = torch.from_numpy(random.exponential(size=(num_rows, 2, FAN_OUT)))
    actual = sample(native, logits, torch.ones(num_rows), top_k, top_p, min_p, times)
    for row, filters in enumerate(chosen):
        weights = kept(logits[row].double().numpy(), 1.0, *filters)
        assert actual[row] == winner(weights, times[row].numpy())
    assert len(set(actual.tolist())) > num_rows // 2


@pytest.mark.parametrize("level", [*(level.name for level in built_levels()), None])
def test_some_rows_are_drawn_from_in_any_order(level: str | None) -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(0, 2, (6, 300)).astype(np.float32))
    rows = torch.tensor([4, 1, 5])
    columns = (torch.ones(3), torch.tensor([0, 5, 0]), torch.tensor([1.0, 1.0, 0.9]), torch.zeros(3))
    times = torch.from_numpy(random.exponential(size=(3, 2, FAN_OUT)))
    with using(level):
        assert torch.equal(api.sample(logits, *columns, times, rows=rows), api.sample(logits[rows], *columns, times))
        with pytest.raises(ValueError, match="one parameter of a kind per row"):
            api.sample(logits, *columns, times)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_yield_some_token(fault: float, native: Library) -> None:
    """The sampler ends such rows; the kernel must come back and stay within the vocabulary."""
    logits = torch.randn(len(FILTERS), 4500, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = fault
    logits[::2] = fault
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*FILTERS, strict=True))
    times = torch.ones(len(FILTERS), 3, FAN_OUT, dtype=torch.float64)
    tokens = sample(native, logits, torch.ones(len(FILTERS)), top_k, top_p, min_p, times)
    assert bool(((tokens >= 0) & (tokens < 4500)).all())
