"""The benchmark of kernels: what counts as work, and what it is held against. The kernels have tests of their own."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.kernels import cases, timing
from benchmarks.kernels.timing import Case, Limit, Timed
from benchmarks.machine import ModelSize
from kernels.linear.api import pack_linear
from kernels.linear.blocks import BlockForm
from kernels.linear.reference import ReferenceLinear
from services.gpu_worker.models.config import DecoderConfig
from services.gpu_worker.models.families import parse_config

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture
def config() -> DecoderConfig:
    return parse_config(TINY, {})


def test_a_kernel_is_held_against_the_limit_beside_it() -> None:
    """The machine doubles its speed halfway; the share of the limit stays."""
    speeds = iter([100.0, 100.0, 200.0, 200.0])
    case = Case("sleep", lambda: time.sleep(0.01), amount=0.5, limit=Limit.READ, bar=20.0)
    found = timing.measure(case, lambda: next(speeds), repeats=2, min_s=0.01)
    assert found.ms == pytest.approx(10.0, rel=0.5)
    expected = 100 * (0.5 / 0.01 / 100 + 0.5 / 0.01 / 200) / 2
    assert found.share == pytest.approx(expected, rel=0.5)


def test_only_cases_with_a_bar_are_judged() -> None:
    case = Case("a", lambda: None, 1.0, Limit.BF16, bar=90.0)
    bar = timing.bar_of(case, Timed(1.0, 1.0, 91.0))
    assert bar is not None and bar.is_met and bar.at_least and bar.name == "a, of bf16 peak"
    assert not timing.bar_of(case, Timed(1.0, 1.0, 89.0)).is_met  # type: ignore[union-attr]
    assert timing.bar_of(replace(case, bar=None), Timed(1.0, 1.0, 1.0)) is None


def test_products_count_every_weight_of_the_model_once(config: DecoderConfig) -> None:
    size = ModelSize(2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64), 32 * 96)
    total = size.num_body + size.num_head
    few, many = cases.products(config, "bf16", pack_linear, (4, 32))
    assert (few.amount, few.limit, few.bar) == (2.0 * total, Limit.READ, cases.READ_BAR)
    assert (many.amount, many.limit, many.bar) == (2.0 * 32 * total, Limit.BF16, cases.BF16_BAR)
    quantized, _ = cases.products(config, "int8", partial(pack_linear, is_int8=True), (1, 64))
    assert quantized.amount == total
    few.run()


def test_blocks_count_their_scales_and_have_no_bar_at_many_rows(config: DecoderConfig) -> None:
    size = ModelSize(2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64), 32 * 96)
    for form, num_bytes in ((BlockForm.Q8_0, 34), (BlockForm.Q4_0, 18), (BlockForm.Q4_1, 20)):
        few, many = cases.products(config, form.lower(), partial(cases.pack_blocks, form=form), (4, 32))
        assert few.amount == (size.num_body + size.num_head) * num_bytes / 32
        assert (few.limit, few.bar, many.limit, many.bar) == (Limit.READ, cases.READ_BAR, Limit.INT8, None)
        few.run()


def test_what_is_not_compiled_is_not_measured(config: DecoderConfig) -> None:
    with pytest.raises(SystemExit, match="make kernels"):
        next(cases.products(config, "bf16", lambda weight: ReferenceLinear(weight, None), (4,)))


def test_decode_attention_reads_every_key_and_value_once(config: DecoderConfig) -> None:
    case = cases.decode_attention(config, 3, 40, None)
    assert case.amount == 3 * 48 * 2 * 2 * 2 * 8 * 2, "rows × whole blocks × layers × (K, V) × heads × head_dim × bytes"
    case.run()


def test_prefill_attention_and_small_operations_run(config: DecoderConfig) -> None:
    with torch.inference_mode():
        for case in (cases.prefill_attention(config, 2, 20), *cases.small_operations(config, 10)):
            case.run()
