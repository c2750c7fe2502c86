"""Sharing the cores of a machine between workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.gpu_worker.service import partition
from services.gpu_worker.service.partition import divide, plan_partition, thread_environment


@pytest.mark.parametrize("num_cores", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_disjoint_complete_and_even(num_cores: int, count: int) -> None:
    cores = list(range(10, 10 + num_cores))
    shares = [divide(cores, index, count) for index in range(count)]
    assert {core for share in shares for core in share} == set(cores)
    if num_cores >= count:
        assert sum(len(share) for share in shares) == num_cores
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(len(share) == 1 for share in shares)


def test_index_beyond_the_count_wraps_around() -> None:
    assert divide([0, 1, 2, 3], 5, 2) == divide([0, 1, 2, 3], 1, 2)


def make_topology(folder: Path, cores: list[tuple[int, int]]) -> None:
    """(package, physical core) of each logical core."""
    for number, (package, physical) in enumerate(cores):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{physical}\n")


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """2 sockets × 2 cores × 2 threads, numbered as Linux does: second threads last."""
    make_topology(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
    monkeypatch.setattr(partition, "_CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(partition, "_CGROUP", tmp_path)
    monkeypatch.setattr(partition, "_allowed_cores", lambda: list(range(8)))
    return tmp_path


def test_a_share_is_whole_cores_of_one_socket(two_sockets: Path) -> None:
    first, second = plan_partition(0, 2), plan_partition(1, 2)
    assert (first.cores, first.num_threads) == ((0, 1, 4, 5), 2)
    assert (second.cores, second.num_threads) == ((2, 3, 6, 7), 2)


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1)])
def test_container_quota_bounds_the_threads(two_sockets: Path, quota: str, threads: int) -> None:
    (two_sockets / "cpu.max").write_text(quota + "\n")
    assert plan_partition(0, 1).num_threads == threads


def test_idle_threads_do_not_spin_on_cores_that_others_need(two_sockets: Path) -> None:
    environment = thread_environment(plan_partition(0, 2))
    assert environment["OMP_NUM_THREADS"] == "2"
    assert int(environment["GOMP_SPINCOUNT"]) <= 10_000


def test_process_and_its_threads_are_pinned() -> None:
    code = (
        "import os, threading\n"
        "from services.gpu_worker.service.partition import apply_partition, plan_partition\n"
        "share = plan_partition(0, len(os.sched_getaffinity(0)))\n"
        "apply_partition(share)\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        "assert seen == [set(share.cores)] and len(share.cores) == 1, (seen, share)\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=True)
