"""A worker dies; another one goes on with its streams, beside its own ones. Time is counted, not measured."""

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.prefill_budget import STRETCH
from shared.messages import StepPlan
from tests.fakes.scheduler_world import World, make_submission

PREFILL_RATE, BASE_S, ROW_S, TARGET_S = 2_000.0, 0.016, 0.0005, 0.03
NUM_STREAMS, PROMPT, TOLD = 16, 120, 20
NEW = "new"


def two_workers() -> World:
    """With streams on both that have told something, and a new prompt on one."""
    config = SchedulerConfig(max_model_len=1_000, max_num_batched_tokens=2_048, plan_ahead=1, itl_target_s=TARGET_S)
    world = World(config)
    for name in ("v", "w"):
        world.join(name, 2_000, rates=[(PREFILL_RATE, BASE_S, ROW_S, 0.0)])
    for number in range(NUM_STREAMS):
        prompt = [1 + (number + place) % 20 for place in range(PROMPT)]
        world.submit(make_submission(f"s{number}", prompt, max_tokens=600, min_tokens=600, ignore_eos=True))
    while min(num_told(world).values()) < TOLD:
        world.turn()
        world.step("v")
        world.step("w")
    world.submit(make_submission(NEW, [7] * 900, max_tokens=1))
    world.turn()
    return world


def num_told(world: World) -> dict[str, int]:
    return {name: len(reader.tokens) for name, reader in world.readers.items() if name != NEW}


def survivor_of(world: World) -> str:
    """The worker that has the new prompt; the other one dies now."""
    seat = world.core.requests[NEW].seat
    assert seat is not None
    (victim,) = {"v", "w"} - {seat.lane.worker}
    world.fence(victim)
    return seat.lane.worker


def plans_of(world: World, survivor: str) -> list[StepPlan]:
    """Up to the next token of every stream."""
    told, plans = num_told(world), []
    while any(now == told[name] for name, now in num_told(world).items()):
        world.turn()
        plans.append(world.workers[survivor].inbox[-1])
        world.step(survivor)
    return plans


def num_prefill(plan: StepPlan) -> int:
    return sum(size for _, size in plan.chunks)


def test_who_waits_for_its_next_token_is_not_held_back_for_others() -> None:
    """Its silence is the longest gap of all, so it has nine tenths of each step."""
    world = two_workers()
    plans = plans_of(world, survivor_of(world))
    num_lost, num_tokens = world.core.counters.requeues, sum(map(num_prefill, plans))
    assert num_lost >= NUM_STREAMS // 2 - 1 and num_tokens >= num_lost * (PROMPT + TOLD)
    assert len(plans) <= 2 + num_tokens / ((STRETCH - 1) * BASE_S * PREFILL_RATE)
    longest_s = max(map(num_prefill, plans)) / PREFILL_RATE
    assert longest_s <= (STRETCH - 1) * (BASE_S + NUM_STREAMS * ROW_S), "those that run go on meanwhile"


def test_a_new_prompt_keeps_to_the_target_meanwhile() -> None:
    """Nobody waits for a next token of it."""
    world = two_workers()
    survivor = survivor_of(world)
    plans = plans_of(world, survivor)
    (row,) = [seat.row for seat in world.core.lanes[survivor].prefill.values() if seat.request.request_id == NEW]
    sizes = [size for plan in plans for number, size in plan.chunks if number == row]
    assert sizes and max(sizes) <= (TARGET_S - BASE_S) * PREFILL_RATE
    assert max(map(num_prefill, plans)) > 5 * max(sizes)
