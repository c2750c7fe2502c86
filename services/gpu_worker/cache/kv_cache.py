"""The paged KV cache of one worker.

One allocation, block-major: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]. A block is one run of
memory over all layers, and neighbouring blocks are neighbours in memory: moving a run of blocks is one copy. A layer's
K and V are views with the block stride that kernels/paged_attention/api.py allows. In the packed layout
(kernels/kv_layout) the two inner dimensions only state the size of a run, not its order; so do they in a cache of codes
(int8 or fp8), which has two bytes of scale beside each `head_dim`. Scales therefore go wherever their block goes.
"""

from dataclasses import dataclass

import torch

from kernels.kv_layout.api import (
    KVLayout,
    are_scales_aligned,
    can_pack,
    holds_codes,
    pack_keys,
    pack_values,
    read_plain,
    unpack_keys,
    unpack_values,
    vector_width,
    view_keys,
    view_values,
    write_plain,
)
from kernels.launch import stores_fp8
from kernels.native.library import current
from kernels.native.memory import allocate
from services.gpu_worker.models.config import ModelConfig
from shared.errors import ConfigError

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the name of the setting."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of `num_blocks` blocks. What fresh memory holds is of no meaning."""

    data: torch.Tensor
    layout: KVLayout = KVLayout.PLAIN

    @classmethod
    def allocate(
        cls,
        model_config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: KVLayout | None = None,
    ) -> "KVCache":
        """Reserve the cache; without a `layout`, in the one that the fastest kernels of the device read.

        Raises:
            ConfigError: sizes below one, scales of codes on odd bytes, or the device has no room.
        """
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"the KV cache needs at least one block of one token, not {num_blocks} of {block_size}")
        heads, head_dim = model_config.num_kv_heads, model_config.head_dim
        shape = (num_blocks, model_config.num_layers, 2, heads, block_size, vector_width(dtype, head_dim))
        if layout is None:
            layout = best_layout(dtype, block_size, head_dim, torch.device(device))
        if holds_codes(dtype) and not are_scales_aligned(block_size, head_dim):
            raise ConfigError(f"KV as codes needs blocks or heads of an even size, not {block_size} and {head_dim}")
        try:
            return cls(_memory(shape, dtype, torch.device(device)), layout)
        except (RuntimeError, MemoryError, OverflowError, OSError, ValueError) as error:
            raise ConfigError(f"no room for {num_blocks} KV blocks of {block_size} tokens: {error}") from error

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def num_layers(self) -> int:
        return self.data.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.data.shape[4]

    @property
    def bytes_per_block(self) -> int:
        return self.data[0].nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as kernels take them, plain or packed."""
        keys, values = self.data[:, index, 0], self.data[:, index, 1]
        return (keys, values) if self.layout is KVLayout.PLAIN else (view_keys(keys), view_values(values))

    def read(self, blocks: slice | list[int]) -> torch.Tensor:
        """Numbers of blocks, [count, num_layers, 2, num_kv_heads, block_size, head_dim]; may be a view. Codes are read
        as float32."""
        memory = self.data[blocks]
        if self.layout is KVLayout.PLAIN:
            return read_plain(memory)
        keys, values = unpack_keys(view_keys(memory[:, :, 0])), unpack_values(view_values(memory[:, :, 1]))
        return torch.stack((keys, values), 2)

    def write(self, first: int, plain: torch.Tensor) -> None:
        """Overwrite the blocks from `first` on; `plain` as `read` gives it."""
        memory = self.data[first : first + len(plain)]
        if self.layout is KVLayout.PLAIN:
            write_plain(plain, memory)
            return
        pack_keys(plain[:, :, 0], view_keys(memory[:, :, 0]))
        pack_values(plain[:, :, 1], view_values(memory[:, :, 1]))


def cache_dtype(
    stored: torch.dtype,
    computed: torch.dtype,
    config: ModelConfig,
    block_size: int,
    device: torch.device,
    setting: str = "auto",
) -> torch.dtype:
    """What the cache of a model holds: codes if `setting` says so, else the dtype that it computes in, except for
    bfloat16 models that a CPU multiplies in float32. There the C++ kernels widen 16 bits in registers: half the memory,
    and half of it to read in every step.
    """
    if setting in CODES:
        return CODES[setting]
    is_wider = stored == torch.bfloat16 and computed == torch.float32
    packs = best_layout(stored, block_size, config.head_dim, device) is KVLayout.PACKED
    return stored if is_wider and packs else computed


def check_setting(setting: str, device: torch.device) -> None:
    """Whether the kernels of a device know what `setting` asks for.

    Raises:
        ConfigError: they do not.
    """
    if setting == "fp8" and device.type == "cpu":
        raise ConfigError("kv_cache_dtype fp8 is for GPUs: no kernel of a CPU reads it; int8 takes the same memory")
    if setting == "fp8" and not stores_fp8(device):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"kv_cache_dtype fp8: {name} has no float8_e4m3fn; int8 takes the same memory")


def best_layout(dtype: torch.dtype, block_size: int, head_dim: int, device: torch.device) -> KVLayout:
    """Packed on CPUs that have C++ kernels, if the sizes allow it."""
    packs = device.type == "cpu" and can_pack(dtype, block_size, head_dim) and current() is not None
    return KVLayout.PACKED if packs else KVLayout.PLAIN


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    width = vector_width(dtype, config.head_dim)
    return 2 * config.num_layers * config.num_kv_heads * width * block_size * dtype.itemsize
