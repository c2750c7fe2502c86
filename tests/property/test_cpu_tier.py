"""The host pool under pressure: many long answers in small pools, so that requests are swapped and blocks demoted."""

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.evictable import Eviction
from services.scheduler.core.extents import Fit
from shared.messages import FinishReason
from tests.fakes.scheduler_world import BLOCK_BYTES, make_submission
from tests.property.test_core import MAX_MODEL_LEN, WORKERS, Action, Play, byte

NUM_EXAMPLES = 120

# Names repeat by how often they should happen.
NAMES = (
    ["submit"] * 6
    + ["turn"] * 4
    + ["step"] * 4
    + ["run"] * 12
    + [
        "stop_away",
        "abort_away",
        "fence",
        "drain",
        "save",
        "abort",
        "stop",
        "stop_away",
        "abort_away",
        "join",
        "fence",
        "drain",
        "fail",
        "lose",
        "save",
        "restart",
    ]
)


def parse_script(data: bytes) -> list[Action]:
    return [Action(NAMES[data[i] % len(NAMES)], data[i + 1], data[i + 2]) for i in range(0, len(data) - 2, 3)]


scripts = st.binary(min_size=120, max_size=240).map(parse_script)
host_sizes = st.sampled_from([4, 12, 4, 2, 12, 1, 0])
"""Quarters of what the longest request needs."""
copy_rates = st.sampled_from([20, 500, 500])
"""Blocks per second."""
configs = st.builds(
    SchedulerConfig,
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(3, 5),
    max_num_batched_tokens=st.integers(4, 20),
    plan_ahead=st.sampled_from([1, 2, 2]),
    admission_room=st.integers(0, 2),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    eviction=st.sampled_from(Eviction),
    fit=st.sampled_from(Fit),
    preemption=st.sampled_from(
        [Preemption.AUTO, Preemption.SWAP, Preemption.AUTO, Preemption.SWAP, Preemption.RECOMPUTE]
    ),
    demotion=st.booleans(),
)


class Pressure(Play):
    """Like `Play`, but answers are long, and pools hold between one and two of the longest requests."""

    def __init__(self, config: SchedulerConfig, host_size: int, copy_rate: int) -> None:
        super().__init__(config)
        longest = config.blocks_for(MAX_MODEL_LEN)
        self.num_cpu_blocks = -(-host_size * longest // 4)
        self.copy_rate = copy_rate * BLOCK_BYTES

    def submit(self, a: int, b: int) -> None:
        number = len(self.world.readers)
        prompt = [1 + (a // 32 + position) % 20 for position in range(1 + a % 24)]
        told = 16 + b % 9
        submission = make_submission(
            f"r{number}", prompt, max_tokens=min(told, MAX_MODEL_LEN - len(prompt)), ignore_eos=True
        )
        self.world.submit(submission)

    def join(self, a: int, b: int) -> None:
        longest = self.world.config.blocks_for(MAX_MODEL_LEN)
        num_blocks = longest * (4 + b % 5) // 4
        self.world.join(WORKERS[a % len(WORKERS)], num_blocks, self.num_cpu_blocks, self.copy_rate)

    def _away(self, a: int) -> str | None:
        away = [diagnosis.request_id for diagnosis in self.world.core.diagnostics() if diagnosis.reason == "swapped"]
        return away[a % len(away)] if away else None

    def abort_away(self, a: int, b: int) -> None:
        request_id = self._away(a)
        if request_id is not None:
            self.world.abort(request_id)
            self.seen["aborted while swapped"] += 1

    def stop_away(self, a: int, b: int) -> None:
        """A stop string completed in what was told before."""
        request_id = self._away(a)
        if request_id is not None and self.world.readers[request_id].tokens:
            self.seen["stopped while swapped"] += 1
            self.world.stop(request_id, max(1, len(self.world.readers[request_id].tokens) - b % 3))

    def fence(self, a: int, b: int) -> None:
        self.seen["fenced with swapped"] += self.world.num_swapped_on(WORKERS[a % len(WORKERS)])
        super().fence(a, b)

    def drain(self, a: int, b: int) -> None:
        self.seen["drained with swapped"] += self.world.num_swapped_on(WORKERS[a % len(WORKERS)])
        super().drain(a, b)

    def restart(self, a: int, b: int) -> None:
        self.seen["restarted with swapped"] += any(self.world.num_swapped_on(name) for name in WORKERS)
        super().restart(a, b)

    def save(self, a: int, b: int) -> None:
        self.seen["saved with swapped"] += any(self.world.num_swapped_on(name) for name in WORKERS)
        super().save(a, b)


@pytest.mark.slow
def test_swap_demotion_and_recompute_never_change_a_text() -> None:
    """BEST-25 for all ways of preemption: everything ends, whatever is swapped, demoted, fenced, drained or aborted."""
    seen: Counter[str] = Counter()

    @settings(max_examples=max(NUM_EXAMPLES, settings().max_examples), phases=[Phase.explicit, Phase.generate])
    @given(configs, host_sizes, copy_rates, st.integers(1, 3), byte, scripts)
    def run(
        config: SchedulerConfig,
        host_size: int,
        copy_rate: int,
        num_workers: int,
        capacity: int,
        script: list[Action],
    ) -> None:
        play = Pressure(config, host_size, copy_rate)
        for index in range(num_workers):
            play.join(index, capacity + 3 * index)
        for action in script:
            play.act(action)
        play.finish()
        seen.update(play.seen)
        seen[f"swapped by {config.preemption}"] += play.world.num_swapped

    run()
    for mechanism, least in MECHANISMS.items():
        assert seen[mechanism] >= least, f"{mechanism} hardly happened: {seen}"
    assert not seen["swapped by recompute"]


MECHANISMS = {
    "preempted": 100,
    "swapped by swap": 30,
    "swapped by auto": 10,
    "back": 30,
    "demoted": 100,
    "promoted": 20,
    "requeued": 20,
    "lost": 5,
    "aborted while swapped": 3,
    "stopped while swapped": 3,
    "fenced with swapped": 3,
    "drained with swapped": 3,
    "saved with swapped": 3,
    "restarted with swapped": 3,
    FinishReason.LENGTH: 100,
    FinishReason.STOP: 20,
    FinishReason.ABORT: 20,
    FinishReason.ERROR: 20,
}
