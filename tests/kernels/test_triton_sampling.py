"""The Triton sampler, in the interpreter, against the torch reference with the same random numbers."""

import pytest
import torch

from kernels.sampling import reference
from kernels.sampling import triton as sampling
from kernels.sampling.api import FAN_OUT, num_levels, sample

VOCABULARIES = [50, 64, 111, 4100]
"""One, two and three levels of races."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def times_of(num_rows: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
    uniform = torch.rand(
        num_rows, num_levels(vocab_size), FAN_OUT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return -(uniform.clamp(min=1e-9)).log()


def run(
    logits: torch.Tensor, temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float]
) -> torch.Tensor:
    """Tokens of the kernel, which must be those of the reference."""
    columns = (
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
        times_of(*logits.shape),
    )
    out = torch.full((len(logits),), -7)
    before = logits.clone()
    sampling.launch(out, logits, *columns).run()
    assert logits.equal(before)
    assert out.tolist() == reference.sample(logits, *columns).tolist()
    return out


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_rows_with_parameters_of_their_own(vocab_size: int) -> None:
    logits = random(5, vocab_size) * 4
    run(
        logits,
        [1.0, 0.7, 1.3, 1.0, 1e-3],
        [0, 20, -1, 7, vocab_size],
        [1.0, 1.0, 0.8, 0.9, 1.0],
        [0.0, 0.0, 0.0, 0.05, 0.2],
    )


def test_one_token_is_left() -> None:
    logits = random(3, 111)
    tokens = run(logits, [1.0, 1.0, 1.0], [1, 0, 0], [1.0, 1e-6, 1.0], [0.0, 0.0, 1.0])
    assert tokens.equal(logits.argmax(-1))


def test_equal_logits_are_kept_together() -> None:
    """The second largest occurs five times: with top_k = 2 all six tokens can be drawn, and no other."""
    logits = torch.zeros(12, 100)
    logits[:, 30], logits[:, 50:55] = 2.0, 1.5
    tokens = run(logits, [1.0] * 12, [2] * 12, [1.0] * 12, [0.0] * 12)
    assert set(tokens.tolist()) <= {30, *range(50, 55)} and len(set(tokens.tolist())) > 2


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((6, 70), -torch.inf)
    logits[:, 66:68] = 0.0
    tokens = run(logits, [1.0] * 6, [0, 5] * 3, [1.0] * 5 + [0.9], [0.0] * 6)
    assert set(tokens.tolist()) <= {66, 67}


@pytest.mark.parametrize("fault", ["times", "rows", "dtype"])
def test_wrong_shapes_are_refused(fault: str) -> None:
    logits = random(2, 100)
    temperature, top_k, times = torch.ones(2), torch.zeros(2, dtype=torch.int64), times_of(2, 100)
    if fault == "times":
        times = times[:, :1]
    elif fault == "rows":
        temperature = torch.ones(3)
    else:
        logits = logits.double()
    with pytest.raises(ValueError, match="sample"):
        sample(logits, temperature, top_k, torch.ones(2), torch.zeros(2), times)
