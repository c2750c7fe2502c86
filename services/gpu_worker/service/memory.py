"""How many KV blocks a worker can hold."""

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

GIB = 1 << 30
CPU_CACHE_LIMIT = 4 * GIB
"""Default bound of the KV cache in main memory, all workers of the machine together."""
CPU_CACHE_SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What the settings ask for; 0 leaves a number to the machine."""

    num_blocks: int
    memory: int
    """Bytes."""
    num_workers: int


def blocks_on_cpu(request: CacheRequest, bytes_per_block: int) -> int:
    """Number of KV blocks in main memory.

    Raises:
        ConfigError: not even one block fits.
    """
    if request.num_blocks:
        return request.num_blocks
    default = int(min(CPU_CACHE_LIMIT, CPU_CACHE_SHARE * available_memory())) // request.num_workers
    return _num_blocks(request.memory or default, bytes_per_block)


def blocks_in_host_pool(num_blocks: int, memory: int, bytes_per_block: int) -> int:
    """Number of blocks of a worker's host pool: `num_blocks`, or what fits `memory` bytes; 0 if both are.

    Raises:
        ConfigError: not even one block fits what was asked for, or the machine has less memory left.
    """
    if not num_blocks and not memory:
        return 0
    wanted = num_blocks or _num_blocks(memory, bytes_per_block)
    available = available_memory()
    if wanted * bytes_per_block > available:
        raise ConfigError(f"a host pool of {wanted} blocks needs {wanted * bytes_per_block} of {available} bytes")
    return wanted


def blocks_on_gpu(request: CacheRequest, bytes_per_block: int, *, free: int, total: int, utilization: float) -> int:
    """Number of KV blocks on a GPU that has `free` of `total` bytes left after weights and warm-up buffers.

    Raises:
        ConfigError: not even one block fits.
    """
    if request.num_blocks:
        return request.num_blocks
    used = total - free
    return _num_blocks(request.memory or int(total * utilization) - used, bytes_per_block)


def _num_blocks(memory: int, bytes_per_block: int) -> int:
    if memory < bytes_per_block:
        raise ConfigError(f"no room for one KV block of {bytes_per_block} bytes in {max(memory, 0)} bytes")
    return memory // bytes_per_block


def available_memory() -> int:
    """Bytes that this process can still take: what the machine has left, within the container's limit."""
    available = _machine_memory()
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - current))


def _machine_memory() -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{_MEMINFO} does not say how much memory is available: give num_blocks or kv_cache_memory")
