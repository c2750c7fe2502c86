"""What the benchmark finds in the worker's KV cache, against what can be counted by hand."""

from pathlib import Path

import pytest
import torch

from benchmarks.kv_cache.in_process import make_engine
from benchmarks.kv_cache.real_memory import Load, measure_real_memory, tokens_in
from benchmarks.kv_cache.real_sharing import measure_real_sharing
from benchmarks.kv_cache.simulated import WASTE
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import Model
from tests.fakes.tiny_llama import write_tiny_llama

TOKENS = [5 + (7 * position) % 80 for position in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    return load_model(folder, dtype="float32", device="cpu")


def test_tokens_are_found_where_a_key_was_written(model: Model) -> None:
    cache = make_engine(model, num_blocks=4, max_num_seqs=1, max_model_len=64).cache
    cache.data.zero_()
    plain = torch.zeros(1, *cache.read([0]).shape[1:])
    plain[0, 0, 0, 1, 3, 2] = 1.0  # layer 0, keys, head 1, offset 3
    plain[0, 0, 1, 0, 5, 0] = 1.0  # a value is no key
    plain[0, 1, 0, 0, 6, 0] = 1.0  # nor is another layer's
    cache.write(2, plain)
    assert tokens_in(cache, [2]) == tokens_in(cache, [0, 1, 2, 3]) == 1
    assert tokens_in(cache, [0, 1]) == 0


def test_memory_of_one_length_is_as_reckoned(model: Model) -> None:
    """Every request has 20 tokens and then one more per step: what is written is 20 to 23 of 32 slots."""
    load = Load(num_blocks=8, max_model_len=64, num_requests=4, prompt=20, output=4, spread=0.0)
    with torch.inference_mode():
        paged, preallocated = measure_real_memory(model, TOKENS, load)
    assert paged["requests at a time"] == 4 and preallocated["requests at a time"] == 2
    assert paged["tokens a request"] == 23, "looked at in the fourth step"
    assert paged[WASTE] == pytest.approx(100 * (1 - 23 / 32))
    assert preallocated[WASTE] == pytest.approx(100 * (1 - 23 / 64))
    assert float(preallocated["MiB a request"] or 0) == 2 * float(paged["MiB a request"] or 0)


def test_reused_blocks_do_not_count_as_full(model: Model) -> None:
    """Twelve requests go through a pool with room for few of them: old keys must not be taken for new ones."""
    load = Load(num_blocks=10, max_model_len=64, num_requests=12, prompt=30, output=12)
    with torch.inference_mode():
        paged, _ = measure_real_memory(model, TOKENS, load)
    assert 1 < float(paged["requests at a time"] or 0) < 5
    assert 5 < float(paged[WASTE] or 0) < 35


def test_sharing_is_measured_for_choices_and_beams(model: Model) -> None:
    """A prompt of 45 tokens: two full blocks are shared by all, the third is copied for everybody but the first."""
    with torch.inference_mode():
        choices, beams = measure_real_sharing(model, TOKENS[:45], 4, 8)
    assert (choices["blocks in tables"], choices["blocks in use"]) == (16, 2 + 4 * 2)
    assert choices["copied on write"] == 3
    assert float(beams["blocks in tables"] or 0) == 16
    assert 2 + 4 <= float(beams["blocks in use"] or 0) <= 2 + 4 * 2
    assert float(beams["copied on write"] or 0) >= 3
