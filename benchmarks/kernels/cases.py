"""The kernels of a decoder like SmolLM2-135M at the sizes that matter, through their public entries.

Products run over the weights of all layers in turn and in one call, as a step does: what one layer needs would stay in
a cache, and Python between them would leave the memory idle.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.timing import Case, Limit
from kernels.gated.api import silu_mul
from kernels.linear.api import Linear, pack_linear
from kernels.linear.blocks import BLOCK, BlockForm, BlockWeight
from kernels.linear.native import LinearSequence, NativeLinear
from kernels.paged_attention.api import AttentionBatch, paged_attention, prepare
from kernels.rms_norm.api import rms_norm
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models.config import DecoderConfig

BLOCK_SIZE = 16
FEW_ROWS = 4
"""Up to so many rows a product is bound by reading weights."""
MANY_ROWS = 32
"""From so many rows on it is bound by arithmetic."""
READ_BAR, BF16_BAR, INT8_BAR, ATTENTION_BAR = 85.0, 90.0, 75.0, 75.0
"""Per cent of the limit."""
Pack = Callable[[torch.Tensor], Linear]
BYTES = {"bf16": 2.0, "int8": 1.0, **{form.lower(): form.bytes_per_block / BLOCK for form in BlockForm}}
"""Of a weight, scales and minima of blocks included."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All packed weights of a model, with random values."""

    linears: Sequence[Linear]
    num_weights: int

    def with_inputs(self, inputs: dict[int, torch.Tensor]) -> LinearSequence:
        """Every product once; `inputs` by their width.

        Raises:
            SystemExit: there are no compiled kernels.
        """
        native = [linear for linear in self.linears if isinstance(linear, NativeLinear)]
        if len(native) < len(self.linears):
            raise SystemExit("the C++ kernels are measured, and are not compiled: make kernels")
        return LinearSequence([(linear, inputs[linear.in_features]) for linear in native])


def pack_weights(config: DecoderConfig, pack: Pack) -> Weights:
    """Those of every layer and of the head, in bfloat16 before they are packed."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    layer = (
        (heads + 2 * kv_heads, hidden),
        (hidden, heads),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
    )
    shapes = [*layer * config.num_layers, (config.vocab_size, hidden)]
    random = torch.Generator().manual_seed(0)
    linears = [pack((0.05 * torch.randn(shape, generator=random)).bfloat16()) for shape in shapes]
    return Weights(linears, sum(outputs * inputs for outputs, inputs in shapes))


def pack_blocks(weight: torch.Tensor, form: BlockForm) -> Linear:
    """Random blocks of the shape of `weight`."""
    random = torch.Generator().manual_seed(0)
    lowest, highest = (0, 16) if form.is_nibbles else (-128, 128)
    codes = torch.randint(lowest, highest, weight.shape, generator=random, dtype=torch.int8)
    blocks = (weight.shape[0], weight.shape[1] // BLOCK, form.num_factors)
    return pack_linear(BlockWeight(form, codes, (0.01 * torch.randn(blocks, generator=random)).half()))


def products(config: DecoderConfig, kind: str, pack: Pack, rows: Sequence[int]) -> Iterator[Case]:
    """All products of a step. `kind`: of BYTES. Many rows of blocks have no bar: their every 32 numbers end with a
    conversion and a product by a scale."""
    weights = pack_weights(config, pack)
    is_integer = kind != "bf16"
    for num_rows in rows:
        widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
        inputs = {width: torch.randn(num_rows, width).bfloat16() for width in widths}
        run = weights.with_inputs(inputs)
        name = f"{kind} products, {num_rows} rows"
        if num_rows <= 2 * FEW_ROWS:
            amount = weights.num_weights * BYTES[kind]
            yield Case(name, run, amount, Limit.READ, READ_BAR if num_rows <= FEW_ROWS else None)
        else:
            limit = Limit.INT8 if is_integer else Limit.BF16
            bar = {"bf16": BF16_BAR, "int8": INT8_BAR}.get(kind)
            yield Case(name, run, 2.0 * num_rows * weights.num_weights, limit, bar if num_rows >= MANY_ROWS else None)


class Attention:
    """Several layers of a cache, more than processors cache, with a query for each."""

    def __init__(self, config: DecoderConfig, query_lens: Sequence[int], context_lens: Sequence[int]) -> None:
        self.config = config
        blocks = [-(-length // BLOCK_SIZE) for length in context_lens]
        self.cache = KVCache.allocate(config, sum(blocks), BLOCK_SIZE, torch.bfloat16, "cpu")
        self.cache.data.normal_()
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, (start, count) in enumerate(zip(np.cumsum([0, *blocks[:-1]]).tolist(), blocks, strict=True)):
            tables[row, :count] = order[start : start + count]
        lens = (np.array(query_lens, np.int64), np.array(context_lens, np.int64))
        self.batch: AttentionBatch = prepare(*lens, tables, self.cache.layer(0)[0])
        self.query = torch.randn(sum(query_lens), config.num_heads, config.head_dim).bfloat16()

    @property
    def num_bytes(self) -> int:
        """Of all keys and values."""
        return self.cache.data.nbytes

    def run(self) -> None:
        """Attention of every layer."""
        for index in range(self.cache.num_layers):
            paged_attention(self.query, *self.cache.layer(index), self.batch, scale=self.config.attention_scale)


def decode_attention(config: DecoderConfig, num_rows: int, context: int, bar: float | None) -> Case:
    """One query a row."""
    attention = Attention(config, [1] * num_rows, [context] * num_rows)
    name = f"decode attention, {num_rows} × {context:,} tokens"
    return Case(name, attention.run, float(attention.num_bytes), Limit.READ, bar)


def prefill_attention(config: DecoderConfig, num_rows: int, length: int) -> Case:
    """Whole prompts; two products for each pair of a query and a key that it sees."""
    attention = Attention(config, [length] * num_rows, [length] * num_rows)
    pairs = num_rows * length * (length + 1) / 2
    operations = 4.0 * config.head_dim * config.num_heads * pairs * attention.cache.num_layers
    return Case(f"prefill attention, {num_rows} × {length:,} tokens", attention.run, operations, Limit.BF16)


def small_operations(config: DecoderConfig, num_rows: int) -> Iterator[Case]:
    """What lies between products, over inputs that processors do not cache."""
    hidden = torch.randn(num_rows, config.hidden_size).bfloat16()
    weight = torch.ones(config.hidden_size).bfloat16()
    gate_up = torch.randn(num_rows, 2 * config.intermediate_size).bfloat16()
    moved = 2.0 * hidden.nbytes
    yield Case(f"RMSNorm, {num_rows:,} rows", partial(rms_norm, hidden, weight, 1e-5), moved, Limit.READ)
    yield Case(f"SiLU·mul, {num_rows:,} rows", partial(silu_mul, gate_up), 1.5 * gate_up.nbytes, Limit.READ)
