"""Sampling on a GPU: one program per row, no sort, nothing of the size of the vocabulary is written.

A row's scaled logits, the largest of which is 0, are compared by the bits of their absolute value, which are in the
order of the numbers. A cutoff (the k-th largest, the edge of a nucleus) is found digit by digit: in one pass over the
row, the weights at or above each of four candidates are summed, so 16 passes find any of the 2 ** 32. The row stays in
the L2 cache between them.
"""

import torch
import triton
import triton.language as tl

from kernels.launch import Launch

FAN_OUT = tl.constexpr(64)
_TILE = tl.constexpr(4096)


@triton.jit
def _scaled(logits, tokens, vocab_size, largest, temperature):
    """(logit - largest) / temperature, -inf past the vocabulary."""
    values = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return (values - largest) / temperature


@triton.jit
def _rank(scaled):
    """An integer in the order of numbers that are at most 0."""
    return 0x7FFFFFFF - tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _search(logits, vocab_size, largest, temperature, floor, wanted, COUNTS: tl.constexpr):
    """The largest rank such that what is at or above it, and at or above `floor`, weighs at least `wanted`.

    A token weighs 1 if COUNTS, else the exponential of its scaled logit."""
    found = tl.zeros([], tl.int64)
    candidates = tl.arange(0, 4)
    for step in range(16):  # digits of two bits, the highest first
        shift = 30 - 2 * step
        thresholds = found + (candidates.to(tl.int64) << shift)
        weight = tl.zeros([4], tl.float32)
        for first in range(0, vocab_size, _TILE):
            tokens = first + tl.arange(0, _TILE)
            scaled = _scaled(logits, tokens, vocab_size, largest, temperature)
            rank = _rank(scaled)
            weights = tl.exp(scaled) if not COUNTS else tl.where(tokens < vocab_size, 1.0, 0.0)
            weights = tl.where(rank >= floor, weights, 0.0)
            reached = rank[None, :].to(tl.int64) >= thresholds[:, None]
            weight += tl.sum(tl.where(reached, weights[None, :], 0.0), 1)
        digit = tl.sum(((weight >= wanted) & (candidates > 0)).to(tl.int64), 0)
        found += digit << shift
    return found.to(tl.int32)


@triton.jit
def _first_to_arrive(weights, times):
    """Index of the largest quotient of [FAN_OUT] weights and exponential times."""
    return tl.argmax(weights / tl.load(times + tl.arange(0, FAN_OUT)).to(tl.float32), 0)


@triton.jit
def sample_kernel(
    out,  # [n] int64
    logits,  # [n, vocab_size] float32, rows stride apart
    temperature,  # [n] float32
    top_k,  # [n] int64, 0 or less for all
    top_p,  # [n] float32
    min_p,  # [n] float32
    times,  # [n, LEVELS, FAN_OUT] float64
    vocab_size,
    stride,
    LEVELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    times += row * LEVELS * FAN_OUT
    heat = tl.load(temperature + row)
    lanes = tl.arange(0, FAN_OUT)

    maxima = tl.full([_TILE], float("-inf"), tl.float32)
    for first in range(0, vocab_size, _TILE):
        tokens = first + tl.arange(0, _TILE)
        maxima = tl.maximum(maxima, tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf")))
    largest = tl.max(maxima, 0)

    lowest = tl.zeros([], tl.int32)
    smallest = tl.load(min_p + row)
    if smallest > 0.0:
        lowest = _rank(tl.log(smallest))
    limit = tl.load(top_k + row)
    if (limit > 0) & (limit < vocab_size):
        lowest = tl.maximum(lowest, _search(logits, vocab_size, largest, heat, 0, limit.to(tl.float32), True))
    nucleus = tl.load(top_p + row)
    if nucleus < 1.0:
        sums = tl.zeros([_TILE], tl.float32)
        for first in range(0, vocab_size, _TILE):
            scaled = _scaled(logits, first + tl.arange(0, _TILE), vocab_size, largest, heat)
            sums += tl.where(_rank(scaled) >= lowest, tl.exp(scaled), 0.0)
        wanted = tl.sum(sums, 0) * nucleus
        lowest = tl.maximum(lowest, _search(logits, vocab_size, largest, heat, lowest, wanted, False))

    # The races of race.py: among tiles, families of the first tile, tokens of the first family.
    tile = tl.zeros([], tl.int32)
    leaves = lanes[:, None] * FAN_OUT + lanes[None, :]
    if LEVELS == 3:
        best = tl.full([], -1.0, tl.float32)
        for index in range(tl.cdiv(vocab_size, _TILE)):
            scaled = _scaled(logits, index * _TILE + leaves, vocab_size, largest, heat)
            weights = tl.where(_rank(scaled) >= lowest, tl.exp(scaled), 0.0)
            speed = tl.sum(tl.sum(weights, 1), 0) / tl.load(times + index).to(tl.float32)
            tile = tl.where(speed > best, index, tile)
            best = tl.maximum(best, speed)
    family = tile * FAN_OUT
    if LEVELS >= 2:
        scaled = _scaled(logits, tile * _TILE + leaves, vocab_size, largest, heat)
        weights = tl.where(_rank(scaled) >= lowest, tl.exp(scaled), 0.0)
        family += _first_to_arrive(tl.sum(weights, 1), times + (LEVELS - 2) * FAN_OUT)
    scaled = _scaled(logits, family * FAN_OUT + lanes, vocab_size, largest, heat)
    weights = tl.where(_rank(scaled) >= lowest, tl.exp(scaled), 0.0)
    token = family * FAN_OUT + _first_to_arrive(weights, times + (LEVELS - 1) * FAN_OUT)
    tl.store(out + row, tl.minimum(token, vocab_size - 1).to(tl.int64))  # in range even if the logits were NaN


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    times: torch.Tensor,
) -> torch.Tensor:
    """See api.sample."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    launch(out, logits, temperature, top_k, top_p, min_p, times).run()
    return out


def launch(
    out: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    times: torch.Tensor,
) -> Launch:
    """The kernel that fills `out` [n]; the columns and `times` are contiguous, rows of `logits` any stride apart."""
    arguments: dict[str, object] = {
        "out": out,
        "logits": logits,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "times": times,
        "vocab_size": logits.shape[1],
        "stride": logits.stride(0),
    }
    return Launch(sample_kernel, (len(logits),), arguments, {"LEVELS": times.shape[1]}, num_warps=8)
