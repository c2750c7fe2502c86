"""What a model of Transformers does, found out by running it: the shape of its KV cache, and whether it is a function
of tokens, positions, keys and values alone, as a paged cache needs it."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.paged_attention.api import prepare
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models.fields import require
from services.gpu_worker.models.model import ForwardInputs, Model

_BLOCK_SIZE = 8
_TOKENS = tuple(range(1, 13))
_CUTS = (0, 5, 9, 10, 11, 12)
"""The second row computes the tokens between these in one step each: chunks at first, then decode."""
_TOLERANCE = {torch.float32: 1e-3}
_COARSE = 0.2
"""Of 16-bit dtypes. Another state than keys and values makes a difference of the order of 1."""


@dataclass(slots=True)
class Survey:
    """Stands in for a step: notes what attention is asked for, computes nothing."""

    layers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Layer → KV heads and head_dim."""
    windows: dict[int, int | None] = field(default_factory=dict)

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """[num_tokens, heads, head_dim] each -> the same as `query`."""
        require(index not in self.layers, f"layer_idx {index} is there twice")
        alike = key.shape == value.shape and query.shape[2] == key.shape[2]
        require(alike, f"keys {tuple(key.shape[1:])} and values {tuple(value.shape[1:])} differ in shape")
        self.layers[index] = (key.shape[1], key.shape[2])
        self.windows[index] = window
        return query

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0][0]

    @property
    def head_dim(self) -> int:
        return self.layers[0][1]


@torch.inference_mode()
def survey(model: Any, config: Any) -> Survey:
    """Run two tokens through a Transformers model.

    Args:
        model: loaded with our attention function.
        config: of its text part.

    Raises:
        ConfigError: not every layer attends through the interface, or layers differ where the cache needs them alike.
    """
    found = Survey()
    ids = torch.tensor([_TOKENS[:2]], device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    model(input_ids=ids, position_ids=positions, use_cache=False, paged_step=found)
    num_layers = int(config.num_hidden_layers)
    through = f"{found.num_layers} of num_hidden_layers {num_layers} attend through Transformers' attention interface"
    require(sorted(found.layers) == list(range(num_layers)), through)
    shapes = sorted(set(found.layers.values()))
    require(len(shapes) == 1, f"layers differ in (KV heads, head_dim): {shapes}")
    _check_windows(found, config)
    return found


def _check_windows(found: Survey, config: Any) -> None:
    """A window that is only in the mask would be lost: the mask is not built."""
    types = getattr(config, "layer_types", None)
    if types is None:
        asked = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        require(not asked or any(found.windows.values()), "sliding_window does not reach its attention")
        return
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    require(not unknown, f"layer_types {', '.join(unknown)}")
    lost = [index for index, kind in enumerate(types) if kind == "sliding_attention" and not found.windows[index]]
    require(not lost, f"sliding_window does not reach the attention of layers {lost}")


@torch.inference_mode()
def check(model: Model) -> None:
    """Compute one row at once, and the same row in pieces beside it: both must end at the same logits.

    Raises:
        ConfigError: they do not.
    """
    config = model.config
    blocks_each = -(-len(_TOKENS) // _BLOCK_SIZE)
    cache = KVCache.allocate(config, 2 * blocks_each, _BLOCK_SIZE, model.dtype, model.device)
    cache.data.fill_(float("nan"))
    spans = list(itertools.pairwise(_CUTS))
    pieces = [_forward(model, cache, [(1, *spans[0]), (0, 0, len(_TOKENS))])]
    pieces += [_forward(model, cache, [(1, *span)]) for span in spans[1:]]
    whole, last = pieces[0][1].double(), pieces[-1][0].double()
    error = float((whole - last).norm() / whole.norm())
    sound = error < _TOLERANCE.get(model.dtype, _COARSE)  # false for NaN, too
    require(
        sound, f"a row in pieces differs from the row at once by {error:.1e}: it keeps state beside keys and values"
    )


def _forward(model: Model, cache: KVCache, rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """Logits after the last token of each (row, start, end)."""
    blocks_each = cache.num_blocks // 2
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    for row, start, end in rows:
        token_ids += _TOKENS[start:end]
        positions += range(start, end)
        slots += range(row * blocks_each * _BLOCK_SIZE + start, row * blocks_each * _BLOCK_SIZE + end)
        ends.append(len(positions) - 1)
    tables = torch.tensor([range(row * blocks_each, (row + 1) * blocks_each) for row, _, _ in rows], dtype=torch.int32)
    lengths = np.array([(end - start, end) for _, start, end in rows])
    place = model.device
    inputs = ForwardInputs(
        token_ids=torch.tensor(token_ids, device=place),
        positions=torch.tensor(positions, device=place),
        slot_mapping=torch.tensor(slots, device=place),
        attention=prepare(lengths[:, 0], lengths[:, 1], tables.to(place), cache.layer(0)[0]),
        sample_at=torch.tensor(ends, device=place),
    )
    return model.forward(inputs, cache)
