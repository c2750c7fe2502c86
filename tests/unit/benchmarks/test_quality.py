"""Perplexity and divergence: the arithmetic, and a real tiny model against itself and against a changed one."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.quality.__main__ import TEXT
from benchmarks.quality.compare import Sums, compare
from services.gpu_worker.models.loading import load_model
from tests.fakes.tiny_llama import write_tiny_llama


def test_the_arithmetic_is_that_of_two_known_distributions() -> None:
    sums = Sums()
    sums.add(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1]))
    assert sums.perplexities == pytest.approx((4 / 3, 2.0))
    assert sums.change == pytest.approx(0.5)
    assert sums.mean_kl == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert sums.num_agreed == 0


def test_a_model_does_not_differ_from_itself_but_from_a_rounded_one(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    exact, rounded = (load_model(tmp_path, dtype=dtype, device="cpu") for dtype in ("float32", "bfloat16"))
    tokens = [3 + (7 * index) % 50 for index in range(75)]
    same = compare(exact, exact, tokens, 32)
    assert (same.mean_kl, same.change, same.num_predicted, same.num_agreed) == (0.0, 0.0, 72, 72)
    other = compare(exact, rounded, tokens, 32)
    assert 0 < other.mean_kl < 0.1
    assert other.reference_nll == pytest.approx(same.reference_nll)


@pytest.mark.model
def test_the_text_is_long_enough(model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert len(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids) >= 5_100, "5,000 predictions and then some"
