"""Sizing the KV cache."""

from pathlib import Path

import pytest

from services.gpu_worker.service import memory
from services.gpu_worker.service.memory import (
    GIB,
    CacheRequest,
    available_memory,
    blocks_in_host_pool,
    blocks_on_cpu,
    blocks_on_gpu,
)
from shared.errors import ConfigError

BLOCK = 1 << 20


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path, available: int) -> None:
    """A machine with `available` bytes and a container folder without limits."""
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", folder / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", folder)


@pytest.mark.parametrize(
    ("available", "workers", "expected"),
    [(64 * GIB, 1, 4096), (64 * GIB, 2, 2048), (8 * GIB, 1, 2048), (8 * GIB, 4, 512)],
)
def test_default_is_a_quarter_of_what_is_free_but_at_most_4_gib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, available: int, workers: int, expected: int
) -> None:
    machine(monkeypatch, tmp_path, available)
    assert blocks_on_cpu(CacheRequest(0, 0, workers), BLOCK) == expected


def test_given_sizes_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, 8 * GIB)
    assert blocks_on_cpu(CacheRequest(7, 100 * BLOCK, 2), BLOCK) == 7
    assert blocks_on_cpu(CacheRequest(0, 100 * BLOCK + 1, 2), BLOCK) == 100


def test_container_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, 64 * GIB)
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert available_memory() == 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() == 64 * GIB


def test_no_room_for_a_block_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, 2 * BLOCK)
    with pytest.raises(ConfigError, match="no room"):
        blocks_on_cpu(CacheRequest(0, 0, 1), BLOCK)


def test_gpu_share_covers_weights_and_cache_together() -> None:
    request = CacheRequest(0, 0, 1)
    assert blocks_on_gpu(request, BLOCK, free=70 * GIB, total=80 * GIB, utilization=0.9) == 62 * 1024
    with pytest.raises(ConfigError, match="no room"):
        blocks_on_gpu(request, BLOCK, free=5 * GIB, total=80 * GIB, utilization=0.9)


def test_host_pool_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, 8 * GIB)
    assert blocks_in_host_pool(0, 0, BLOCK) == 0
    assert blocks_in_host_pool(7, 4 * GIB, BLOCK) == 7
    assert blocks_in_host_pool(0, 4 * GIB + 1, BLOCK) == 4096
    for num_blocks, size in ((0, BLOCK - 1), (0, 9 * GIB), (9 * 1024, 0)):
        with pytest.raises(ConfigError):
            blocks_in_host_pool(num_blocks, size, BLOCK)


def test_this_machine_has_memory() -> None:
    assert available_memory() > 0
