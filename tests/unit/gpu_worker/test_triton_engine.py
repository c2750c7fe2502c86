"""The worker as it runs on a GPU, except for the GPU: every operation goes to its Triton kernel, in the interpreter."""

import importlib

import pytest
import torch

from kernels.kv_layout.api import KVLayout
from kernels.launch import Launch
from kernels.native.library import using
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig, graphs
from services.gpu_worker.engine.graphs import DecodeGraphs, Pass, Record, recorded_sizes
from services.gpu_worker.models.loading import load_model
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver

OPS = ("cache_write", "paged_attention", "rms_norm", "gated")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran, in order."""
    names: list[str] = []
    run = Launch.run

    def counted(launch: Launch) -> None:
        names.append(launch.kernel.__name__)
        run(launch)

    monkeypatch.setattr(Launch, "run", counted)
    for op in OPS:
        monkeypatch.setattr(importlib.import_module(f"kernels.{op}.api"), "runs_triton", lambda tensor: True)
    return names


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)


def prompt_of(size: int) -> list[int]:
    return [3 + (size * 7 + 11 * at) % 50 for at in range(size)]


def run_two(driver: EngineDriver) -> dict[str, list[int]]:
    """One row decodes while another computes its prompt in chunks."""
    driver.add("a", prompt_of(6), greedy(4))
    driver.step()
    driver.add("b", prompt_of(5), greedy(2))
    return driver.run(chunk_size=3)


def test_tokens_equal_those_of_transformers(launched: list[str], tiny) -> None:
    with using(None):  # C++ products would do the gate's work as well
        model = load_model(tiny.folder, dtype="float32", device="cpu")
    cache = KVCache.allocate(model.config, 200, 8, model.dtype, model.device, KVLayout.PLAIN)
    outputs = run_two(EngineDriver(Engine(model, cache, EngineConfig(8, 512))))
    assert outputs == {"a": tiny.expected(prompt_of(6), 4), "b": tiny.expected(prompt_of(5), 2)}
    ops = ("decode", "combine", "prefill", "cache_write", "rms_norm", "gated")
    assert {f"{op}_kernel" for op in ops} <= set(launched)


def eager(calls: list[int]) -> Record:
    """Stands for a recorder: what a graph would replay is run as it is, and its rows are noted."""

    def record(forward: Pass) -> Pass:
        def replay() -> torch.Tensor:
            logits = forward()
            calls.append(len(logits))
            return logits

        return replay

    return record


def test_recorded_decode_steps_give_the_same_tokens(launched: list[str], tiny, make_driver) -> None:
    """Padded to 1, 2 or 4 rows, from memory that stays."""
    driver, replayed = make_driver(max_num_seqs=3, layout=KVLayout.PLAIN), list[int]()
    engine = driver.engine
    engine._graphs = DecodeGraphs(tiny.model, engine.cache, engine.config, eager(replayed))
    engine._graphs.record()
    launched.clear()
    driver.add("c", prompt_of(3), greedy(6))
    driver.step()
    outputs = run_two(driver)
    assert outputs["c"] == tiny.expected(prompt_of(3), 6)
    assert outputs["a"] == tiny.expected(prompt_of(6), 4) and outputs["b"] == tiny.expected(prompt_of(5), 2)
    assert 4 in replayed, "three rows run as four"
    assert "prefill_kernel" in launched, "steps with chunks are not replayed"


def test_longer_contexts_than_recorded_run_as_they_are(
    launched: list[str], tiny, make_driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_LONGEST_CONTEXT", 7)
    driver, replayed = make_driver(max_num_seqs=1, layout=KVLayout.PLAIN), list[int]()
    engine = driver.engine
    engine._graphs = DecodeGraphs(tiny.model, engine.cache, engine.config, eager(replayed))
    engine._graphs.record()
    driver.add("a", prompt_of(5), greedy(6))
    assert driver.run()["a"] == tiny.expected(prompt_of(5), 6)
    assert replayed == [1, 1], "of contexts of 6 and 7 tokens"


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (8, [1, 2, 4, 8]), (17, [1, 2, 4, 8, 16, 24])]
)
def test_recorded_sizes(rows: int, sizes: list[int]) -> None:
    assert recorded_sizes(rows) == sizes
