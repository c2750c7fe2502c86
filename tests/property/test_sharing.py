"""Sharing under pressure: choices and beam searches in small pools, and something happens to them all the time."""

import zlib
from collections import Counter
from typing import Any

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
from tests.property.test_core import ITL_TARGETS, MAX_MODEL_LEN, WORKERS, Action, Play

NUM_EXAMPLES = 90

# Names repeat by how often they should happen.
NAMES = ["submit"] * 7 + ["turn"] * 4 + ["step"] * 4 + ["run"] * 12 + ["strike"] * 5 + ["join"] * 2 + ["fail", "lose"]
STRIKES = ("abort", "stop", "fence", "drain", "restart", "fail")
PENALTIES = (1.0, 0.0, 2.0, -0.5)

scripts = st.binary(min_size=120, max_size=240)
configs = st.builds(
    SchedulerConfig,
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(4, 8),
    max_num_batched_tokens=st.integers(4, 20),
    plan_ahead=st.sampled_from([1, 2, 2]),
    policy=st.sampled_from(PolicyName),
    admission_room=st.integers(0, 1),
    itl_target_s=ITL_TARGETS,
    enable_prefix_caching=st.booleans(),
    eviction=st.sampled_from(Eviction),
    fit=st.sampled_from(Fit),
    preemption=st.sampled_from(Preemption),
)


class Sharing(Play):
    """Like `Play`, but most requests are choices or searches, and a pool hardly holds the largest search."""

    def __init__(self, config: SchedulerConfig, number: int) -> None:
        super().__init__(config)
        self.number = number
        """Spread evenly, as what Hypothesis draws is not."""

    def draw(self, size: int) -> int:
        self.number = zlib.crc32(self.number.to_bytes(4, "big"))
        return self.number % size

    def submit(self, a: int, b: int) -> None:
        prompt = [1 + (a // 32 + position) % 20 for position in range(1 + self.draw(20))]
        kind = self.draw(5)
        if kind < 2:
            width = 1 + self.draw(3)
            search: dict[str, Any] = {"beam_width": width, "num_hypotheses": 1 + self.draw(width)}
            self._submit(prompt, b, length_penalty=PENALTIES[self.draw(4)], **search)
        elif kind == 2:
            self._submit(prompt, b, with_logprobs=True)
        else:
            group = f"r{len(self.world.readers)}"
            for choice in range(2 + self.draw(3)):
                self._submit(prompt, b, group=group, choice=choice, with_logprobs=kind == 4)

    def _submit(self, prompt: list[int], b: int, **params: Any) -> None:
        self.world.submit(
            make_submission(
                f"r{len(self.world.readers)}",
                prompt,
                max_tokens=12 + b % 9,
                min_tokens=(0, 4)[b % 2],
                stop_token_ids=((), (), (5, 7))[b % 3],
                ignore_eos=b % 4 != 0,
                tenant=("", "other")[b // 4 % 2],
                cache_salt=("", "", "salt")[b // 16 % 3],
                priority=(0, 3)[b // 8 % 2],
                **params,
            )
        )

    def join(self, a: int, b: int) -> None:
        longest = self.world.config.blocks_for(MAX_MODEL_LEN)
        num_cpu_blocks, rates = (0, longest)[self.draw(2)], drawn_rates(self.number, copied_blocks=(20, 500))
        self.world.join(WORKERS[a % len(WORKERS)], longest * (5 + self.draw(5)) // 4, num_cpu_blocks, rates)

    def strike(self, a: int, b: int) -> None:
        """Something happens while a choice or a search runs, to it or to its worker."""
        running = [diagnosis for diagnosis in self.world.core.diagnostics() if diagnosis.worker]
        searching = [each for each in running if self.world.records[each.request_id].params.beam_width]
        forked = [each for each in running if self.world.records[each.request_id].group]
        victims = (searching, forked)[self.draw(2)]
        if not victims:
            return
        victim, name = victims[b % len(victims)], STRIKES[self.draw(len(STRIKES))]
        if name == "stop":
            self.world.stop(victim.request_id, max(1, len(self.world.readers[victim.request_id].tokens) - b % 3))
        elif name == "restart":
            if b % 2:
                self.world.save()
            self.world.restart()
        elif name in ("abort", "fail"):
            getattr(self.world, name)(victim.request_id)
        else:
            getattr(self.world, name)(victim.worker)
        self.seen[f"{name} while {'searching' if victims is searching else 'sharing'}"] += 1


@pytest.mark.slow
def test_sharing_blocks_never_changes_a_text() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=at_least(NUM_EXAMPLES), phases=[Phase.explicit, Phase.generate])
    @given(configs, st.integers(1, 3), scripts)
    @counted
    def run(config: SchedulerConfig, num_workers: int, data: bytes) -> None:
        play = Sharing(config, zlib.crc32(data))
        for index in range(num_workers):
            play.join(index, 0)
        for i in range(0, len(data) - 2, 3):
            play.act(Action(NAMES[data[i] % len(NAMES)], data[i + 1], data[i + 2]))
        play.finish()
        seen.update(play.seen)

    run()
    for mechanism, least in MECHANISMS.items():
        assert seen[mechanism] >= least, f"{mechanism} hardly happened: {seen}"


MECHANISMS = {
    "forked": 200,
    "forked blocks": 200,
    "copied on write": 200,
    "beam searches": 100,
    "beam copies": 100,
    "beam searches preempted": 4,
    "preempted": 50,
    "salted hits": 20,
    "prompts cut short": 20,
    "requeued": 20,
    "handed over": 3,
    "logprobs": 1000,
    **{f"{name} while searching": 3 for name in STRIKES},
    **{f"{name} while sharing": 3 for name in STRIKES},
    FinishReason.LENGTH: 100,
    FinishReason.STOP: 50,
    FinishReason.ABORT: 10,
    FinishReason.ERROR: 10,
}
