"""Perplexity and divergence: the arithmetic, and a real tiny model against itself and against a changed one."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.quality.__main__ import CHANGE_BAR, KL_BAR, SEGMENT, TEXT
from benchmarks.quality.compare import Sums, compare
from kernels.native.library import built_levels
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


@pytest.mark.skipif(not built_levels(), reason="no C++ kernels")
def test_an_int8_cache_changes_predictions_a_little(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    found = compare(model, model, [3 + (7 * index) % 50 for index in range(75)], 32, kv_dtype=torch.int8)
    assert 0 < found.mean_kl < 0.01


@pytest.mark.model
@pytest.mark.skipif(not built_levels(), reason="no C++ kernels")
def test_an_int8_cache_keeps_to_the_bars_of_int8_weights(model_folder: Path) -> None:
    """On a part of the text; `make bench-quality` reads all of it."""
    tokens = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    model = load_model(model_folder, dtype="bfloat16", device="cpu")
    found = compare(model, model, tokens[:1025], SEGMENT, kv_dtype=torch.int8)
    assert 0 < found.mean_kl < KL_BAR and 100 * abs(found.change) < CHANGE_BAR


@pytest.mark.model
def test_the_text_is_long_enough(model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert len(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids) >= 5_100, "5,000 predictions and then some"
