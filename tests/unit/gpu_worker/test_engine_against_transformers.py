"""Greedy float32 tokens equal Transformers' `generate`, however the work is cut and shared."""

import random
from pathlib import Path

import pytest

from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.loading import load_model
from shared.messages import EndReason
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import VARIANTS, VOCAB_SIZE, generate, write_tiny_llama


def prompt_of(size: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{seed}/{size}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"], ids=["one file", "sharded"])
def test_variants_of_the_family_from_one_file_and_from_shards(
    variant: str, max_shard_size: str, tmp_path: Path
) -> None:
    peer = write_tiny_llama(tmp_path, variant, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "100KB")
    model = load_model(tmp_path, dtype="float32", device="cpu")
    engine = Engine(model, KVCache.allocate(model.config, 40, 8, model.dtype, model.device), EngineConfig(2, 300))
    driver = EngineDriver(engine)
    prompt = prompt_of(111)
    request = driver.add("a", prompt, greedy(40))
    driver.run(chunk_size=50)
    assert request.output == generate(peer, prompt, 40)
    assert len(set(request.output)) > 5, "a model that repeats one token would hide mistakes"


@pytest.mark.parametrize("size", [1, 2, 8, 63, 64, 100, 111])
def test_alone(size: int, tiny, make_driver) -> None:
    driver = make_driver()
    driver.add("a", prompt_of(size), greedy(30))
    assert driver.run()["a"] == tiny.expected(prompt_of(size), 30)


@pytest.mark.parametrize("chunk_size", [1, 7, 8, 64])
def test_chunked_prefill(chunk_size: int, tiny, make_driver) -> None:
    driver = make_driver()
    driver.add("a", prompt_of(111), greedy(20))
    assert driver.run(chunk_size=chunk_size)["a"] == tiny.expected(prompt_of(111), 20)
    assert len(driver.results) == -(-111 // chunk_size) + 19


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_rows_that_join_and_leave_at_different_times(block_size: int, tiny, make_driver) -> None:
    driver = make_driver(block_size=block_size)
    sizes = {"a": (40, 25), "b": (100, 12), "c": (5, 30), "d": (63, 3)}
    for request_id, (size, num_tokens) in sizes.items():
        driver.add(request_id, prompt_of(size), greedy(num_tokens))
        for _ in range(3):
            driver.step(chunk_size=33)
    outputs = driver.run(chunk_size=33)
    for request_id, (size, num_tokens) in sizes.items():
        assert outputs[request_id] == tiny.expected(prompt_of(size), num_tokens), request_id
        assert driver.requests[request_id].end is EndReason.LENGTH


@pytest.mark.parametrize("chunk_size", [5, 1000])
@pytest.mark.parametrize("size", [63, 64, 65])
def test_a_row_that_enters_with_computed_tokens_gives_the_same_text(
    size: int, chunk_size: int, tiny, make_driver
) -> None:
    """A prefix hit: its table begins with blocks that another request wrote, and still uses."""
    driver = make_driver(block_size=8)
    first = driver.add("first", prompt_of(size), greedy(40))
    for _ in range(12):
        driver.step()
    num_hits = (size - 1) // 8
    again = driver.add("again", prompt_of(size), greedy(20), hits=first.blocks[:num_hits])
    other = driver.add("other", [*prompt_of(size)[:24], *prompt_of(30, seed=1)], greedy(20), hits=first.blocks[:3])
    penalised = SamplingParams(max_tokens=20, seed=0, temperature=0.0, ignore_eos=True, repetition_penalty=1.5)
    cold = driver.add("cold", prompt_of(size), penalised)
    warm = driver.add("warm", prompt_of(size), penalised, hits=first.blocks[:num_hits])
    driver.run(chunk_size=chunk_size)
    assert again.output == first.output[:20] == tiny.expected(prompt_of(size), 20)
    assert other.output == tiny.expected(other.prompt, 20)
    assert warm.output == cold.output != first.output[:20], "penalties count computed tokens too"
    assert first.output == tiny.expected(prompt_of(size), 40)


def test_a_dropped_row_returns_with_its_tokens_and_continues(tiny, make_driver) -> None:
    """Preemption by recompute: decoded tokens go through the prefill path, in other blocks and another row."""
    driver = make_driver()
    driver.add("a", prompt_of(40), greedy(40), row=2)
    driver.add("b", prompt_of(63), greedy(40), row=0)
    for _ in range(9):
        driver.step()
    assert len(driver.requests["a"].output) == 9
    dropped = driver.step(drop=["a"])
    assert dropped.left == (2,)
    assert len(driver.requests["a"].output) == 9, "a dropped row yields nothing"
    driver.step()
    driver.add("a", prompt_of(40), greedy(40), row=5)
    outputs = driver.run(chunk_size=20)
    assert outputs["a"] == tiny.expected(prompt_of(40), 40)
    assert outputs["b"] == tiny.expected(prompt_of(63), 40)
    rejoined = [entry for result in driver.results for entry in result.joined if entry[1] == "a"]
    assert rejoined == [(2, "a", 0), (5, "a", 9)]


def test_blocks_of_a_row_that_ended_serve_the_next_one(tiny, make_driver) -> None:
    """A pool with room for one request: each takes over the blocks, and the old content, of the one before."""
    driver = make_driver(num_blocks=9, max_num_seqs=1)
    for number in range(4):
        driver.add(f"r{number}", prompt_of(50, number), greedy(20))
        assert driver.run()[f"r{number}"] == tiny.expected(prompt_of(50, number), 20)


def test_a_full_batch(tiny, make_driver) -> None:
    driver = make_driver(max_num_seqs=8)
    for number in range(8):
        driver.add(f"r{number}", prompt_of(3 + 11 * number), greedy(16))
    outputs = driver.run(chunk_size=64)
    for number in range(8):
        assert outputs[f"r{number}"] == tiny.expected(prompt_of(3 + 11 * number), 16)


def test_warm_up_leaves_no_trace(tiny, make_driver) -> None:
    driver = make_driver()
    driver.engine.warm_up()
    assert not driver.engine.cache.data.isnan().all(), "warm-up must have run a step"
    driver = EngineDriver(driver.engine)
    driver.add("a", prompt_of(20), greedy(12))
    assert driver.run()["a"] == tiny.expected(prompt_of(20), 12)
