"""The scheduler core against random worlds: what it decides is judged on the wire, and by the text that comes out."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.scheduler.core.blocks import Reclaim
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.evictable import Eviction
from services.scheduler.core.extents import Fit
from services.scheduler.core.policies.base import PolicyName
from shared.messages import CopyKind, FinishReason, IntakeMessage, ProcessDied, Stop, Submit
from shared.packing import unpack_int32
from tests.fakes.drawn_rates import drawn_rates
from tests.fakes.scheduler_world import World, make_submission
from tests.property.examples import at_least, counted

MAX_MODEL_LEN = 40
WORKERS = ("w0", "w1", "w2")
NUM_EXAMPLES = 500


@dataclass(frozen=True)
class Action:
    """Something that happens; `a` and `b` say to whom and how much."""

    name: str
    a: int
    b: int


# Names repeat by how often they should happen.
NAMES = (
    ["submit"] * 6
    + ["step"] * 8
    + ["turn"] * 8
    + ["run"] * 8
    + ["abort", "abort", "stop", "stop", "join", "fence", "drain", "again", "grave", "stray", "fail", "lose"]
    + ["save", "restart"]
)
byte = st.integers(0, 255)


def parse_script(data: bytes) -> list[Action]:
    """Three bytes per action: drawn as bytes, a script costs Hypothesis next to nothing."""
    return [Action(NAMES[data[i] % len(NAMES)], data[i + 1], data[i + 2]) for i in range(0, len(data) - 2, 3)]


ITL_TARGETS = st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.2])
scripts = st.binary(min_size=150, max_size=360).map(parse_script)
configs = st.builds(
    SchedulerConfig,
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    plan_ahead=st.sampled_from([1, 2, 2]),
    policy=st.sampled_from([*PolicyName, PolicyName.FAIR]),
    priority_ageing_s=st.sampled_from([0.001, 0.02, 1.0]),
    tenant_weights=st.sampled_from(["", "other=3"]),
    max_bypasses=st.sampled_from([0, 1, 3, 16]),
    max_worker_deaths=st.sampled_from([0, 1, 2, 3]),
    admission_room=st.integers(0, 4),
    itl_target_s=ITL_TARGETS,
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    eviction=st.sampled_from(Eviction),
    reclaim=st.sampled_from([Reclaim.LAZY, Reclaim.LAZY, Reclaim.LAZY, Reclaim.IMMEDIATE]),
    fit=st.sampled_from(Fit),
    preemption=st.sampled_from([*Preemption, Preemption.SWAP]),
    demotion=st.booleans(),
)


class Play:
    """Carries out actions on a world."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.world = World(config)
        self.seen: Counter[str] = Counter()

    def act(self, action: Action) -> None:
        getattr(self, action.name)(action.a, action.b)

    def submit(self, a: int, b: int) -> None:
        number = len(self.world.readers)
        prompt = [1 + (a // 64 + position) % 20 for position in range(16 - a % 16)]
        tenant, cache_salt = ("", "", "other")[number % 3], ("", "", "salt", "")[a // 16 % 4]
        if a // 64 == 3:  # a turn later in a conversation
            earlier = f"r{b % max(number, 1)}"
            if earlier in self.world.readers:
                record = self.world.records[earlier]
                told = unpack_int32(record.prompt_tokens).tolist()
                prompt = (told + self.world.readers[earlier].tokens)[: 20 - a % 4] or prompt
                tenant, cache_salt = record.tenant, record.cache_salt
        num_choices = (1, 1, 1, 1, 2, 4)[b // 40 % 6]
        group = f"r{number}" if num_choices > 1 else ""
        search: dict[str, Any] = {}
        if num_choices == 1 and a % 5 == 4:
            width = 1 + b % 3
            search = {
                "beam_width": width,
                "num_hypotheses": 1 + a % width,
                "length_penalty": (1.0, 0.0, 2.0, -0.5)[b % 4],
            }
        for choice in range(num_choices):
            self.world.submit(
                make_submission(
                    f"r{number + choice}",
                    prompt,
                    max_tokens=20 - b % 20,
                    min_tokens=(0, 0, 3)[a % 3],
                    stop_token_ids=((), (), (5, 7))[b % 3],
                    ignore_eos=a % 4 != 0,
                    tenant=tenant,
                    cache_salt=cache_salt,
                    priority=(0, 0, 5, -5)[b % 4],
                    group=group,
                    choice=choice,
                    with_logprobs=b % 4 == 0,
                    **search,
                )
            )

    def step(self, a: int, b: int) -> None:
        self.world.step(WORKERS[a % len(WORKERS)])

    def turn(self, a: int, b: int) -> None:
        self.world.turn()

    def run(self, a: int, b: int) -> None:
        """Fair weather for a while."""
        for _ in range(1 + b % 8):
            self.world.turn()
            for name in WORKERS[: 1 + a % len(WORKERS)]:
                self.world.step(name)

    def abort(self, a: int, b: int) -> None:
        self.world.abort(f"r{a % (len(self.world.readers) + 1)}")

    def stop(self, a: int, b: int) -> None:
        """Mostly as a gateway does: at a token that it has read. Sometimes at one that is still to come."""
        request_id = f"r{a % (len(self.world.readers) + 1)}"
        reader = self.world.readers.get(request_id)
        num_read = len(reader.tokens) if reader else 0
        self.world.stop(request_id, max(1, num_read + 2 - b % 6))

    def join(self, a: int, b: int) -> None:
        """A pool of between one and two requests of the longest kind: it is often full."""
        longest = self.world.config.blocks_for(MAX_MODEL_LEN)
        num_cpu_blocks = (0, 2, longest, 2 * longest, 3 * longest)[b // 7 % 5]
        name, num_blocks = WORKERS[a % len(WORKERS)], longest * (2 + b % 7) // 4
        rates = drawn_rates(256 * a + b, copied_blocks=(0, 20, 500))
        self.world.join(name, num_blocks, num_cpu_blocks, rates, fingerprint=("float32", "bfloat16")[(a + b) % 2])

    def fail(self, a: int, b: int) -> None:
        self.world.fail(f"r{a % (len(self.world.readers) + 1)}")

    def fence(self, a: int, b: int) -> None:
        self.world.fence(WORKERS[a % len(WORKERS)])

    def drain(self, a: int, b: int) -> None:
        self.world.drain(WORKERS[a % len(WORKERS)])

    def again(self, a: int, b: int) -> None:
        self.world.publish_again(-1 - a)

    def grave(self, a: int, b: int) -> None:
        self.world.publish_from_the_grave(a)

    def lose(self, a: int, b: int) -> None:
        self.seen["lost"] += self.world.lose(WORKERS[a % len(WORKERS)])

    def stray(self, a: int, b: int) -> None:
        known = [Submit(request_id) for request_id in list(self.world.records)[-1 - a % 4 :][:1]]
        messages: list[IntakeMessage] = [Stop("nobody", 3), Submit("no-record"), ProcessDied("x"), *known]
        self.world.send(messages[b % len(messages)])

    def save(self, a: int, b: int) -> None:
        self.world.save()

    def restart(self, a: int, b: int) -> None:
        self.world.restart()

    def finish(self) -> None:
        """A worker that holds every request joins; everything comes to its end."""
        config = self.world.config
        self.world.join("w9", 3 * config.blocks_for(MAX_MODEL_LEN))
        self.world.settle()
        self.world.judge_idle()
        self.world.restart()
        self._count()

    def _count(self) -> None:
        stats = self.world.core.stats()
        self.seen.update(self.world.counts)
        self.seen["preempted"] += stats.num_preemptions
        self.seen["requeued"] += stats.num_requeues
        self.seen["numerics switched"] += stats.num_numerics_switches
        self.seen["forked"] += stats.num_forks
        self.seen["forked blocks"] += stats.num_forked_blocks
        self.seen["copied on write"] += sum(
            worker.num_copied[CopyKind.WITHIN] for worker in [*self.world.workers.values(), *self.world.dead]
        )
        self.seen["ignored"] += stats.num_ignored_messages
        self.seen["hits"] += len(self.world.cached)
        self.seen["evicted"] += self.world.num_evicted
        self.seen["made way"] += sum(event.reason == "share" for event in self.world.events)
        self.seen["bypassed"] += self.world.num_bypasses
        self.seen["passed, as judged"] += self.world.bypasses.total()
        self.seen["beam searches preempted"] += self.world.num_searches_preempted
        self.seen["handed over"] += stats.num_handovers
        self.seen["drained"] += self.world.num_drained
        self.seen["swapped"] += self.world.num_swapped
        self.seen["back"] += self.world.num_back
        self.seen["demoted"] += stats.num_demotions
        self.seen["promoted"] += stats.num_promotions
        for reason, count in stats.finished:
            self.seen[reason] += count


@pytest.mark.slow
def test_every_text_is_right_whatever_happens() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=at_least(NUM_EXAMPLES), phases=[Phase.explicit, Phase.generate])
    @given(configs, st.integers(1, 3), byte, scripts)
    @counted
    def run(config: SchedulerConfig, num_workers: int, capacity: int, script: list[Action]) -> None:
        play = Play(config)
        for index in range(num_workers):
            play.join(index, capacity + 3 * index)
        for action in script:
            play.act(action)
            play.seen[action.name] += 1
        play.finish()
        seen.update(play.seen)

    run()
    for mechanism in (
        "preempted",
        "requeued",
        "numerics switched",
        "ignored",
        "hits",
        "salted hits",
        "prompts cut short",
        "went on beyond the target",
        "evicted",
        "shared",
        "bypassed",
        "passed, as judged",
        "left to another worker",
        "made way",
        "forked",
        "forked blocks",
        "copied on write",
        "logprobs",
        "handed over",
        "drained",
        "swapped",
        "back",
        "demoted",
        "promoted",
        "beam searches",
        "beam copies",
        "restart",
        "fence",
        "grave",
        "again",
        "lost",
        *REASONS,
    ):
        assert seen[mechanism] >= 20, f"{mechanism} hardly happened: {seen}"


REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR, FinishReason.REJECTED)
