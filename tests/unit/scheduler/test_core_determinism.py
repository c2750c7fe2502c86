"""Plans are byte-identical across processes and hash seeds."""

import os
import subprocess
import sys
from pathlib import Path

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies.base import PolicyName
from tests.fakes.scheduler_world import World, make_submission

ROOT = Path(__file__).parents[3]
SCRIPT = "from tests.unit.scheduler.test_core_determinism import digests; print(*digests())"


def play(policy: PolicyName) -> World:
    """Two workers, preemptions, aborts, stops, a worker that dies: the same story each time."""
    config = SchedulerConfig(
        max_model_len=80, block_size=4, max_num_seqs=6, max_num_batched_tokens=24, policy=policy, priority_ageing_s=0.01
    )
    world = World(config)
    world.join("w0", 20)
    world.join("w1", 24)
    for index in range(40):
        submission = make_submission(
            f"request-{index * 7919}",
            [1 + index % 5] * (2 + index % 23),
            max_tokens=4 + index % 29,
            ignore_eos=True,
            tenant=f"tenant-{index * index % 7}",
            priority=index % 4,
        )
        world.submit(submission)
        world.turn()
        world.step(f"w{index % 2}")
        if index % 9 == 4:
            world.abort(f"request-{(index - 3) * 7919}")
        if index % 11 == 7:
            world.stop(f"request-{(index - 2) * 7919}", 3)
        if index == 25:
            world.join("w1", 30)
    world.settle()
    world.judge_idle()
    return world


def digests() -> list[str]:
    return [play(policy).digest for policy in PolicyName]


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    for policy in PolicyName:
        stats = play(policy).core.stats()
        assert stats.num_preemptions >= 3
        assert stats.num_requeues >= 1
        assert dict(stats.finished)["abort"] >= 3
        assert dict(stats.finished)["stop"] >= 1
    here = digests()
    assert len(set(here)) == 3, "the policies decide alike"
    assert [_digests_under(seed) for seed in ("0", "1", "4242")] == [here] * 3


def _digests_under(seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()
