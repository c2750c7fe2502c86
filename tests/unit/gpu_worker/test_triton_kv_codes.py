"""The engine over a KV cache of int8 or fp8 codes as on a GPU: its cache write and attention are the Triton kernels, in
the interpreter; the rest of the model is computed by kernels whose rows do not depend on their batch."""

import functools
import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch

from kernels.cache_write.api import rope_cache_write
from kernels.kv_layout.api import KVLayout, read_plain
from kernels.launch import Launch
from kernels.native.library import current
from services.gpu_worker.cache.host_pool import PlainPool, allocate_pool
from services.gpu_worker.cache.kv_cache import CODES, KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.engine.graphs import DecodeGraphs
from services.gpu_worker.models import decoder
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import ForwardInputs, Model, largest_of
from services.gpu_worker.service.loading import fingerprint
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import Driven, EngineDriver
from tests.fakes.tiny_models import FALLBACK, NATIVE, VOCAB_SIZE, write_tiny
from tests.harness.interpreter import add_products_in_order

MODELS = ("gemma2", "qwen3")
"""Windows, a soft cap, one KV head for two; and norms of heads."""
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
NUM_NEW = 3
WINDOW = 10
LONG, SHORT = WINDOW + 3, 3
"""Tokens of prompts: one is longer than the window."""

pytestmark = pytest.mark.skipif(current() is None, reason="torch's products depend on the batch")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(folder, NATIVE[request.param], **SIZES, sliding_window=WINDOW)
    return cast(DecoderModel, load_model(folder, dtype="float32", device="cpu"))


@pytest.fixture(params=CODES)
def code(request: pytest.FixtureRequest) -> torch.dtype:
    return CODES[request.param]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran over codes."""
    names: list[str] = []
    run = Launch.run

    def counted(launch: Launch) -> None:
        over_codes = launch.constants.get("QUANTIZED") or launch.constants.get("LARGEST")
        if over_codes:
            names.append(launch.kernel.__name__)
        run(launch)

    monkeypatch.setattr(Launch, "run", counted)
    for op in ("cache_write", "paged_attention"):
        monkeypatch.setattr(importlib.import_module(f"kernels.{op}.api"), "runs_triton", lambda tensor: True)
    add_products_in_order(monkeypatch)
    return names


class Recording:
    """A model whose logits are kept by the position of the token that they follow."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seen: list[dict[int, torch.Tensor]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        logits = self._model.forward(inputs, cache)
        at = inputs.positions if inputs.sample_at is None else inputs.positions[inputs.sample_at]
        self.seen.append(dict(zip(at.tolist(), logits, strict=True)))
        return logits

    def forward_largest(self, inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        return largest_of(self.forward(inputs, cache))


@dataclass
class Run:
    """An engine on a plain cache all of whose bytes are 0xFF: codes of fp8, scales and numbers are NaN."""

    driver: EngineDriver
    recording: Recording

    @property
    def cache(self) -> KVCache:
        return self.driver.engine.cache

    def logits(self) -> dict[int, torch.Tensor]:
        """After each position, of whichever row had it last: one row, or rows of different lengths."""
        return {position: row for step in self.recording.seen for position, row in step.items()}


def start(model: Model, dtype: torch.dtype, *, num_cpu_blocks: int = 0) -> Run:
    kv = KVCache.allocate(model.config, 24, 8, dtype, "cpu", KVLayout.PLAIN)
    kv.data.view(torch.uint8).fill_(255)
    recording = Recording(model)
    engine = Engine(cast(Model, recording), kv, EngineConfig(4, 128), pool=allocate_pool(kv, num_cpu_blocks, "int8"))
    return Run(EngineDriver(engine), recording)


def prompt_of(size: int) -> list[int]:
    draw = random.Random(size)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def add(run: Run, size: int, name: str = "", num_new: int = NUM_NEW, hits: Sequence[int] = ()) -> Driven:
    params = SamplingParams(max_tokens=num_new, seed=0, temperature=0.0, ignore_eos=True)
    return run.driver.add(name or str(size), prompt_of(size), params, hits=hits)


@functools.cache
def alone(model: DecoderModel, dtype: torch.dtype, size: int = LONG) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Text and logits of a prompt that is computed at once, by itself; once for all tests, which take seconds each."""
    run = start(model, dtype)
    request = add(run, size)
    run.driver.run()
    return request.output, run.logits()


def assert_same_bits(actual: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> None:
    assert set(expected) <= set(actual)
    for position, logits in expected.items():
        assert actual[position].equal(logits), f"logits after position {position}"


def test_the_same_bits_alone_in_a_batch_and_in_chunks(
    model: DecoderModel, code: torch.dtype, launched: list[str]
) -> None:
    texts, expected = dict[str, list[int]](), dict[int, torch.Tensor]()
    for size in (LONG, SHORT):
        texts[str(size)], logits = alone(model, code, size)
        expected |= logits
    for chunk_size in (512, 5):
        run = start(model, code)
        for size in (LONG, SHORT):
            add(run, size)
        assert run.driver.run(chunk_size=chunk_size) == texts
        assert_same_bits(run.logits(), expected)
    assert {f"{op}_kernel" for op in ("cache_write", "decode", "prefill")} == set(launched)


@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_the_same_bits_with_a_prefix_hit_and_after_a_recompute(
    model: DecoderModel, code: torch.dtype, launched: list[str]
) -> None:
    text, expected = alone(model, code)
    run = start(model, code)
    first = add(run, LONG, "first")
    run.driver.step()
    run.driver.step()
    add(run, LONG, "second", hits=first.blocks[: LONG // 8])
    run.recording.seen.clear()
    run.driver.step(drop=["first"])
    assert first.output == text[:2]
    hit = run.recording.seen[0]
    assert hit[LONG - 1].equal(expected[LONG - 1]), "5 tokens behind 8 that another row wrote"
    add(run, LONG, "first")
    assert run.driver.run() == {"first": text, "second": text}
    assert_same_bits(run.logits(), {at: expected[at] for at in range(LONG - 1, LONG + NUM_NEW - 1)})


@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_swaps_and_forks_move_codes_and_scales_as_they_are(
    model: DecoderModel, code: torch.dtype, launched: list[str]
) -> None:
    """The pool was asked for int8, which codes are not turned into."""
    text, expected = alone(model, code)
    run = start(model, code, num_cpu_blocks=8)
    request = add(run, LONG, "a")
    run.driver.step()
    assert isinstance(run.driver.engine.pool, PlainPool)
    data = run.cache.data.view(torch.uint8)
    before = data[request.blocks].clone()
    run.driver.swap_out("a")
    run.driver.step()
    data.fill_(255)
    run.driver.swap_in("a")
    run.driver.step(chunks={})
    assert data[request.blocks].equal(before)
    run.driver.step()
    child = run.driver.fork("child", "a", request.params)
    assert child.blocks[:-1] == request.blocks[:-1] and child.blocks[-1] != request.blocks[-1]
    assert run.driver.run() == {"a": text, "child": text}
    assert_same_bits(run.logits(), expected)


@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_recorded_decode_steps_write_and_read_codes(
    model: DecoderModel, code: torch.dtype, launched: list[str]
) -> None:
    """Three rows run as four; the fourth has no slot and writes nothing."""
    sizes = (LONG, SHORT, 8)
    texts = {str(size): alone(model, code, size)[0] for size in sizes}
    run, replayed = start(model, code), list[int]()
    engine = run.driver.engine

    def record(forward):
        def replay() -> torch.Tensor:
            logits = forward()
            replayed.append(len(logits))
            return logits

        return replay

    engine._graphs = DecodeGraphs(model, run.cache, EngineConfig(4, 128), record)
    engine._graphs.record()
    assert bool((run.cache.data.view(torch.uint8) == 255).all()), "a recording writes nothing"
    for size in sizes:
        add(run, size)
    assert run.driver.run() == texts
    assert replayed == [4] * (NUM_NEW - 1)


@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_logits_are_as_near_to_the_exact_ones_as_half_a_step_of_the_code_allows(
    model: DecoderModel, code: torch.dtype, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding errs by up to half a step of the code. So does evenly distributed noise of that size, put on the exact
    keys and values: codes must not be further from the exact logits than 1.5 times what it is. (The largest number of a
    vector is stored exactly, and most steps of fp8 are shorter than that of the largest mantissa: so codes are nearer.)
    """
    run = start(model, code)
    taken: list[ForwardInputs] = []
    forward = run.recording.forward

    def take(inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        taken.append(ForwardInputs(inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.attention, None))
        return forward(inputs, cache)

    monkeypatch.setattr(run.recording, "forward", take)
    add(run, 24, num_new=1)
    run.driver.run()

    def logits_over(dtype: torch.dtype) -> torch.Tensor:
        return model.forward(taken[0], start(model, dtype).cache)

    exact, coded = logits_over(torch.float32), logits_over(code)
    draw = torch.Generator().manual_seed(0)

    def write_with_noise(heads, cos, sin, k_cache, v_cache, slots, *, norms=None):
        query = rope_cache_write(heads, cos, sin, k_cache, v_cache, slots, norms=norms)
        for cache in (k_cache, v_cache):
            tokens = cache.transpose(1, 2)
            at = (slots // cache.shape[2], slots % cache.shape[2])
            numbers = tokens[at]
            noise = 2 * torch.rand(numbers.shape, generator=draw) - 1
            tokens[at] = numbers + noise * half_a_step(numbers, code)
        return query

    monkeypatch.setattr(decoder, "rope_cache_write", write_with_noise)
    noisy = logits_over(torch.float32)
    error, allowed = ((logits - exact).norm() / exact.norm() for logits in (coded, noisy))
    assert 0.2 * allowed < error < 1.5 * allowed


def half_a_step(numbers: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Most that rounding changes a number: by its vector for int8, by itself for the 3 mantissa bits of fp8."""
    if code == torch.int8:
        return numbers.abs().amax(-1, keepdim=True) / 127 / 2
    return numbers.abs() * 2.0**-4


def test_a_model_of_transformers_writes_and_reads_codes(
    code: torch.dtype, launched: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products are torch's, so logits are near each other and not the same bits."""
    folder = tmp_path_factory.mktemp("gpt2")
    write_tiny(folder, FALLBACK["gpt2"], n_layer=1, n_head=2)
    with monkeypatch.context() as patched:
        for op in ("cache_write", "paged_attention"):
            patched.setattr(importlib.import_module(f"kernels.{op}.api"), "runs_triton", lambda tensor: False)
        model = load_model(folder, dtype="float32", device="cpu")
    whole, run = start(model, code), start(model, code)
    text = add(whole, LONG)
    add(run, LONG)
    assert run.driver.run(chunk_size=5) == whole.driver.run()
    assert len(text.output) == NUM_NEW
    for position, logits in whole.logits().items():
        torch.testing.assert_close(run.logits()[position], logits, rtol=1e-3, atol=1e-3)
    assert {f"{op}_kernel" for op in ("cache_write", "decode", "prefill")} == set(launched)


@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_the_fingerprint_says_what_the_cache_holds(model: DecoderModel, code: torch.dtype) -> None:
    """A pool that copies codes as they are adds nothing to the numerics; one that encodes numbers does."""
    name = str(code).removeprefix("torch.")
    assert f"-kv:{name}-" in fingerprint(model, code) == fingerprint(model, code, "int8")
    assert fingerprint(model, torch.bfloat16, "int8").endswith("-cpu-cache:int8")


@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_a_plain_cache_of_codes_is_read_and_written_as_numbers(model: DecoderModel, code: torch.dtype) -> None:
    kv = start(model, code).cache
    plain = torch.randn(2, *read_plain(kv.data).shape[1:], generator=torch.Generator().manual_seed(0))
    kv.write(2, plain)
    step = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2.0**-4}[code]
    assert ((kv.read([2, 3]) - plain).abs() <= step * plain.abs().amax(-1, keepdim=True)).all()
    others = np.setdiff1d(np.arange(kv.num_blocks), [2, 3])
    assert bool((kv.data.view(torch.uint8)[others] == 255).all())
