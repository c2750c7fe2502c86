"""Blocks that move: to the host pool and back, and from one row to another. The text is that of a row that stayed."""

import random

import msgspec
import pytest

from shared.messages import CopyKind
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import VOCAB_SIZE


def prompt_of(size: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{seed}/{size}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)


def poison_free_blocks(driver: EngineDriver) -> None:
    """Whoever reads what nobody wrote gets NaN and ends with an error."""
    used = {block for request in driver.requests.values() for block in request.blocks}
    driver.engine.cache.data[[b for b in range(driver.engine.cache.num_blocks) if b not in used]] = float("nan")


@pytest.mark.parametrize("num_decoded", [1, 2, 7, 8, 9, 10, 23])
@pytest.mark.parametrize("size", [7, 8, 9, 24, 41])
def test_swapped_out_and_in_after_any_number_of_tokens(size: int, num_decoded: int, tiny, make_driver) -> None:
    """A neighbour takes over the blocks in the very plan that copies them away."""
    driver = make_driver(num_cpu_blocks=20, num_blocks=24)
    request = driver.add("a", prompt_of(size), greedy(40))
    for _ in range(num_decoded):
        driver.step()
    driver.swap_out("a")
    gone = set(request.blocks)
    other = driver.add("b", prompt_of(63), greedy(20))
    result = driver.step()
    assert result.left == (0,) and gone & set(other.blocks)
    driver.step()
    poison_free_blocks(driver)
    driver.swap_in("a", row=5)
    outputs = driver.run()
    assert outputs["a"] == tiny.expected(prompt_of(size), 40)
    assert outputs["b"] == tiny.expected(prompt_of(63), 20)
    rejoined = [entry for result in driver.results for entry in result.joined if entry[1] == "a"]
    assert rejoined == [(0, "a", 0), (5, "a", num_decoded)]


@pytest.mark.parametrize("computed", [1, 7, 8, 9, 40, 49])
def test_swapped_out_in_the_middle_of_its_prompt(computed: int, tiny, make_driver) -> None:
    driver = make_driver(num_cpu_blocks=20)
    driver.add("a", prompt_of(50), greedy(20))
    driver.step({"a": computed})
    driver.swap_out("a")
    assert driver.step().left == (), "readers do not know it yet"
    poison_free_blocks(driver)
    driver.swap_in("a")
    assert driver.run(chunk_size=13)["a"] == tiny.expected(prompt_of(50), 20)


def test_four_rows_go_out_and_in_in_turns(tiny, make_driver) -> None:
    """Host blocks are reused too, in another order each time."""
    driver = make_driver(num_cpu_blocks=24, num_blocks=40)
    sizes = {"a": 3, "b": 16, "c": 40, "d": 65}
    for request_id, size in sizes.items():
        driver.add(request_id, prompt_of(size), greedy(30))
    driver.step()
    for turn in range(8):
        away = "abcd"[turn % 4]
        driver.swap_out(away)
        driver.step()
        driver.step()
        poison_free_blocks(driver)
        driver.swap_in(away)
        driver.step()
    outputs = driver.run()
    for request_id, size in sizes.items():
        assert outputs[request_id] == tiny.expected(prompt_of(size), 30), request_id


@pytest.mark.parametrize("num_decoded", [1, 2, 8, 9])
@pytest.mark.parametrize("size", [7, 8, 9, 40])
def test_forks_continue_as_their_parent_does(size: int, num_decoded: int, tiny, make_driver) -> None:
    """Three forks share its full blocks; each has a copy of the last one, to which all four write."""
    driver = make_driver()
    parent = driver.add("parent", prompt_of(size), greedy(30))
    for _ in range(num_decoded):
        driver.step()
    poison_free_blocks(driver)
    forks = [driver.fork(f"fork-{number}", "parent", greedy(20 + number)) for number in range(3)]
    written = parent.num_written
    assert all(fork.num_computed == written for fork in forks)
    driver.step()
    tables = [fork.blocks for fork in (parent, *forks)]
    assert all(table[: written // 8] == parent.blocks[: written // 8] for table in tables)
    assert len({table[written // 8] for table in tables}) == 4
    outputs = driver.run()
    expected = tiny.expected(prompt_of(size), 30)
    assert outputs["parent"] == expected
    for number, fork in enumerate(forks):
        assert fork.output == expected[: 20 + number]


def test_forks_that_sample_differ_from_each_other_and_equal_rows_of_their_own(tiny, make_driver) -> None:
    """`n` choices of one prompt: the same draws as without sharing."""
    params = SamplingParams(max_tokens=12, seed=9, temperature=1.0, ignore_eos=True)
    choices = [msgspec.structs.replace(params, choice=choice) for choice in range(4)]
    alone = make_driver()
    expected = [alone.add(f"{n}", prompt_of(21), choice) for n, choice in enumerate(choices)]
    alone.run()
    driver = make_driver()
    # a fork that is to draw the first token itself is made before the parent's prompt is computed to its end
    shared = [driver.add("0", prompt_of(21), choices[0])]
    driver.step({"0": 20})
    shared += [driver.fork(f"{number}", "0", choice) for number, choice in enumerate(choices[1:], 1)]
    driver.run()
    assert [request.output for request in shared] == [request.output for request in expected]
    assert len({tuple(request.output) for request in shared}) == 4


def test_a_parent_that_leaves_gives_its_last_block_away_in_the_plan_that_copies_it(tiny, make_driver) -> None:
    driver = make_driver(num_blocks=13)
    parent = driver.add("parent", prompt_of(43), greedy(20))
    for _ in range(3):
        driver.step()
    driver.fork("fork", "parent", greedy(20))
    last = parent.blocks[-1]
    taker = driver.add("taker", prompt_of(30), greedy(10))
    driver.step(drop=["parent"])
    assert last in taker.blocks
    outputs = driver.run()
    assert outputs["fork"] == tiny.expected(prompt_of(43), 20)
    assert outputs["taker"] == tiny.expected(prompt_of(30), 10)


def test_int8_host_pool_changes_the_kv_within_its_error_and_nothing_else(tiny, make_driver) -> None:
    driver = make_driver(num_cpu_blocks=40, cpu_cache_dtype="int8")
    stayed = driver.add("stayed", prompt_of(170), greedy(30))
    request = driver.add("a", prompt_of(170), greedy(30))
    for _ in range(5):
        driver.step()
    driver.swap_out("a")
    driver.step()
    driver.swap_in("a")
    driver.step(chunks={})
    cache = driver.engine.cache
    before, after = cache.read(stayed.blocks[:21]), cache.read(request.blocks[:21])
    scales = before.abs().amax(-1, keepdim=True) / 127
    error = (after - before).abs()
    assert error.max() > 0, "it went through the codec"
    assert bool((error <= 0.501 * scales + 4e-6).all())
    driver.run()
    assert stayed.output == tiny.expected(prompt_of(170), 30)
    assert request.output[:5] == stayed.output[:5] and len(request.output) == 30


def test_a_trial_tells_how_fast_the_host_pool_is_and_real_copies_update_it(make_driver) -> None:
    driver = make_driver(num_cpu_blocks=20)
    driver.engine.warm_up()
    driver = EngineDriver(driver.engine)
    driver.add("a", prompt_of(40), greedy(80))
    first = driver.step()
    prefill, decode_base_s, decode_row_s, copy, _ = first.rates
    assert copy > 1e6 and prefill > 0 and decode_base_s + decode_row_s > 0, "measured at warm-up"
    driver.swap_out("a")
    driver.step()
    driver.swap_in("a")
    while driver.results[-1].step_id < 64:
        driver.step()
    assert all(result.rates == () for result in driver.results[1:63])
    assert driver.results[63].rates[3] not in (0, copy)


def test_without_a_host_pool_the_copy_rate_is_unknown(make_driver) -> None:
    driver = make_driver()
    driver.engine.warm_up()
    driver = EngineDriver(driver.engine)
    driver.add("a", prompt_of(40), greedy(3))
    assert driver.step().rates[3] == 0


def test_copies_are_counted_by_kind_in_the_order_of_the_protocol(make_driver) -> None:
    """The driver makes all three kinds in one plan, so the engine must sort nothing."""
    driver = make_driver(num_cpu_blocks=20)
    for request_id in ("a", "b", "c"):
        driver.add(request_id, prompt_of(20), greedy(20))
    driver.step()
    driver.swap_out("a")
    driver.step()
    driver.swap_out("b")
    driver.fork("d", "c", greedy(9))
    driver.swap_in("a")
    assert list(driver._copies) == [CopyKind.OUT, CopyKind.WITHIN, CopyKind.IN]
    driver.step()
    driver.swap_in("b")
    outputs = driver.run()
    assert outputs["a"] == outputs["b"] == outputs["c"] and outputs["d"] == outputs["c"][:9]
