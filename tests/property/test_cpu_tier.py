"""The host pool under pressure: many long answers in small pools, so that requests are swapped and blocks demoted."""

import zlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.evictable import Eviction
from services.scheduler.core.extents import Fit
from services.scheduler.core.policies.base import PolicyName
from shared.messages import FinishReason
from tests.fakes.drawn_rates import drawn_rates
from tests.fakes.scheduler_world import make_submission
from tests.property.examples import at_least, counted
from tests.property.test_core import ITL_TARGETS, MAX_MODEL_LEN, WORKERS, Action, Play, byte

NUM_EXAMPLES = 120

# Names repeat by how often they should happen.
NAMES = ["submit"] * 7 + ["turn"] * 4 + ["step"] * 4 + ["run"] * 12 + ["strike"] * 5 + ["join"] * 2 + ["fail", "lose"]
# What the script's checksum chooses: evenly, as Hypothesis does not choose.
MODES = (Preemption.SWAP, Preemption.AUTO, Preemption.SWAP, Preemption.AUTO, Preemption.RECOMPUTE)
HOST_SIZES = (4, 12, 4, 2, 12, 1, 0)
"""Quarters of what the longest request needs."""
COPY_RATES = (20, 500, 500)
"""Blocks per second."""

scripts = st.binary(min_size=120, max_size=240)
configs = st.builds(
    SchedulerConfig,
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(3, 5),
    max_num_batched_tokens=st.integers(4, 20),
    plan_ahead=st.sampled_from([1, 2, 2]),
    policy=st.sampled_from(PolicyName),
    admission_room=st.integers(0, 2),
    itl_target_s=ITL_TARGETS,
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    eviction=st.sampled_from(Eviction),
    fit=st.sampled_from(Fit),
    demotion=st.booleans(),
)


class Pressure(Play):
    """Like `Play`, but answers are long, pools hold one to two of the longest requests, and what is swapped is hit."""

    def __init__(self, config: SchedulerConfig, host_size: int, copy_rate: int, first_strike: int) -> None:
        super().__init__(config)
        self.longest = config.blocks_for(MAX_MODEL_LEN)
        self.num_cpu_blocks = -(-host_size * self.longest // 4)
        self.copied_blocks = (copy_rate, copy_rate, 3 * copy_rate)
        self.num_strikes = first_strike

    def submit(self, a: int, b: int) -> None:
        number = len(self.world.readers)
        prompt = [1 + (a // 32 + position) % 20 for position in range(1 + a % 24)]
        max_tokens = min(16 + b % 9, MAX_MODEL_LEN - len(prompt))
        self.world.submit(
            make_submission(
                f"r{number}",
                prompt,
                max_tokens=max_tokens,
                ignore_eos=True,
                tenant=("", "other")[b % 2],
                cache_salt=("", "", "", "salt")[b // 2 % 4],
                priority=(0, 3)[a % 2],
            )
        )

    def join(self, a: int, b: int) -> None:
        num_blocks = self.longest * (4 + b % 5) // 4
        rates = drawn_rates(256 * a + b, self.copied_blocks)
        self.world.join(WORKERS[a % len(WORKERS)], num_blocks, self.num_cpu_blocks, rates)

    def strike(self, a: int, b: int) -> None:
        """Something happens to a swapped request, if there is one."""
        away = [diagnosis for diagnosis in self.world.core.diagnostics() if diagnosis.reason == "swapped"]
        if not away:
            return
        victim = away[b % len(away)]
        self.num_strikes += 1
        name = ("abort", "stop", "fence", "drain", "restart")[self.num_strikes % 5]
        told = len(self.world.readers[victim.request_id].tokens)
        if name == "abort":
            self.world.abort(victim.request_id)
        elif name == "stop":
            self.world.stop(victim.request_id, max(1, told - b % 3))
        elif name == "restart":
            if b % 2:
                self.world.save()
            self.world.restart()
        else:
            getattr(self.world, name)(victim.worker)
        self.seen[f"{name} while swapped"] += 1


@pytest.mark.slow
def test_swap_demotion_and_recompute_never_change_a_text() -> None:
    """BEST-25 for all ways of preemption: everything ends, whatever is swapped, demoted, fenced, drained or aborted."""
    seen: Counter[str] = Counter()

    @settings(max_examples=at_least(NUM_EXAMPLES), phases=[Phase.explicit, Phase.generate])
    @given(configs, st.integers(1, 3), byte, scripts)
    @counted
    def run(config: SchedulerConfig, num_workers: int, capacity: int, data: bytes) -> None:
        number = zlib.crc32(data)
        config = replace(config, preemption=MODES[number % 5])
        play = Pressure(config, HOST_SIZES[number // 5 % 7], COPY_RATES[number // 35 % 3], number)
        for index in range(num_workers):
            play.join(index, capacity + 3 * index)
        for i in range(0, len(data) - 2, 3):
            play.act(Action(NAMES[data[i] % len(NAMES)], data[i + 1], data[i + 2]))
        play.finish()
        seen.update(play.seen)
        seen[f"swapped by {config.preemption}"] += play.world.num_swapped

    run()
    for mechanism, least in MECHANISMS.items():
        assert seen[mechanism] >= least, f"{mechanism} hardly happened: {seen}"
    assert not seen["swapped by recompute"]


MECHANISMS = {
    "preempted": 100,
    "swapped by swap": 20,
    "swapped by auto": 10,
    "back": 30,
    "demoted": 100,
    "promoted": 20,
    "salted hits": 20,
    "prompts cut short": 20,
    "went on beyond the target": 20,
    "requeued": 20,
    "lost": 3,
    "abort while swapped": 3,
    "stop while swapped": 3,
    "fence while swapped": 3,
    "drain while swapped": 3,
    "restart while swapped": 3,
    FinishReason.LENGTH: 100,
    FinishReason.STOP: 3,
    FinishReason.ABORT: 3,
    FinishReason.ERROR: 20,
}
