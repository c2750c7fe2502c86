"""`pagewire top` shows what is there: for people, and for scripts."""

import json
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from services.cli.main import app
from services.cli.pool_frame import read_frame
from services.scheduler.service.overview import CELLS_PER_WORKER
from shared.messages import WorkerState
from tests.integration.scheduler.conftest import Pool, wait_for


def run_top(pool: Pool, *flags: str) -> str:
    result = CliRunner().invoke(app, ["top", "--redis-url", pool.url, "--pool", pool.keys.pool, *flags])
    assert result.exit_code == 0, result.output
    return result.stdout


def busy_pool(pool: Pool, **options: Any) -> None:
    """Two workers, each with 8 rows in use, and 24 requests that wait."""
    for name in ("worker-0", "worker-1"):
        pool.worker(name, step_s=0.05, num_blocks=600, **options)
    pool.scheduler().start()
    wait_for(lambda: pool.health() and _num_workers(pool) == 2)
    pool.submit(40, max_tokens=200, prefix=[1, 2, 3, 4] * 4)
    wait_for(lambda: pool.health() and _frame(pool)["stats"]["num_requests_waiting"] == 24)


def _num_workers(pool: Pool) -> int:
    overview = read_frame(pool.client, pool.keys).overview
    return len(overview.workers) if overview is not None else 0


def _frame(pool: Pool) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(run_top(pool, "--json"))
    return frame


def test_one_frame_as_json_has_everything(pool: Pool) -> None:
    busy_pool(pool)
    wait_for(lambda: pool.health() and _frame(pool)["generated_tokens_per_s"] > 0)
    frame = _frame(pool)
    stats, overview = frame["stats"], frame["overview"]
    assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (16, 24)
    assert dict(stats["waiting_by_reason"]) == {"rows": 1, "behind": 23}
    assert frame["leader"] is not None and frame["limits"]["submitted"] == 40
    workers = {worker["worker"]: worker for worker in overview["workers"]}
    assert list(workers) == ["worker-0", "worker-1"]
    for worker in workers.values():
        assert (worker["num_running"], worker["max_running"], worker["num_blocks"]) == (8, 8, 600)
        blocks = worker["block_map"]
        assert len(blocks) == CELLS_PER_WORKER and blocks.count("#") > 0 and blocks.count(".") > 0
        in_use = 1 - (worker["num_free_blocks"] + worker["num_cached_blocks"]) / 600
        assert abs(blocks.count("#") / len(blocks) - in_use) < 0.05, "a sample of the blocks shows their shares"
    assert len(overview["running"]) == 16 and len(overview["waiting"]) == 24
    running, waiting = overview["running"][0], overview["waiting"]
    assert running["worker"] and running["num_output_tokens"] > 0 and running["state"] == "running"
    assert waiting[0]["reason"] == "rows" and "lacks rows" in waiting[0]["detail"]
    assert waiting[1]["detail"] == f"{waiting[0]['request_id']} goes first"
    assert 0 < frame["hit_rate"] < 1


def test_one_frame_as_text_is_for_people(pool: Pool) -> None:
    busy_pool(pool)
    text = run_top(pool, "--once")
    assert "running 16  waiting 24 (behind 23, rows 1, oldest" in text
    for name in ("worker-0", "worker-1"):
        line = next(line for line in text.splitlines() if line.startswith(name))
        assert "ready" in line and "8/8" in line and "#" in line
    assert "rows: needs a row and" in text


def test_a_draining_worker_is_shown_as_such(pool: Pool) -> None:
    busy_pool(pool)
    pool.workers[0].drain()
    wait_for(lambda: any(w["is_draining"] for w in _frame(pool)["overview"]["workers"]), 5)
    members = {member["name"]: member["state"] for member in _frame(pool)["members"]}
    assert members["worker-0"] == WorkerState.DRAINING


def test_without_a_leader_it_says_so(pool: Pool) -> None:
    frame = _frame(pool)
    assert frame["leader"] is None and frame["stats"] is None
    assert "no scheduler leads" in run_top(pool, "--once")


def test_a_full_disk_is_one_line(pool: Pool) -> None:
    command = [sys.executable, "-m", "services.cli", "top", "--redis-url", pool.url, "--pool", pool.keys.pool]
    for flag in ("--once", "--json"):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*command, flag], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, "error: cannot write: No space left on device\n")


def test_a_redis_that_does_not_answer_is_an_error_in_one_line() -> None:
    result = CliRunner().invoke(app, ["top", "--redis-url", "redis://127.0.0.1:1/0", "--once"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: Redis does not answer") and result.stderr.count("\n") == 1
