"""The simulator's figures against a case worked out by hand, and what happens to workers and clients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.simulator import (
    LatencyModel,
    Piece,
    Report,
    Trace,
    TraceRequest,
    WorkerChange,
    WorkerSpec,
    simulate,
)
from services.scheduler.simulator.generators import generate
from shared.errors import ConfigError

HAND = LatencyModel(
    base_s=1.0,
    decode_row_s=0.1,
    prefill_token_s=0.01,
    context_token_s=0.0,
    copy_bytes_per_s=1.0,
    hop_s=0.0,
    leader_s=0.0,
)


def config(**changes: object) -> SchedulerConfig:
    options: dict[str, object] = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    return SchedulerConfig(**{**options, "plan_ahead": 1, **changes})  # type: ignore[arg-type]


def workers(count: int = 1, num_blocks: int = 16) -> list[WorkerSpec]:
    return [WorkerSpec(name=f"worker-{index}", num_blocks=num_blocks) for index in range(count)]


def request(number: int, arrival: float, **changes: object) -> TraceRequest:
    options: dict[str, object] = {"prompt": (Piece("p", 10),), "output": (Piece(f"o{number}", 3),)}
    return TraceRequest(request_id=f"r{number}", arrival=arrival, **{**options, **changes})  # type: ignore[arg-type]


def test_figures_of_two_requests_by_hand() -> None:
    """One row, a budget of 8 tokens a step. r0: chunks of 8 and 2 (1.08 + 1.02 s), then two decode steps of 1.1 s: its
    tokens come at 2.1, 3.2 and 4.3 s. r1 has the same prompt and arrived at 0.5 s: two of its three blocks are hits, so
    its first step computes 2 tokens (1.02 s): its tokens come at 5.32, 6.42 and 7.52 s."""
    report = simulate(config(), workers(), [request(0, 0.0), request(1, 0.5)], HAND)
    assert report.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0, "rejected": 0, "timeout": 0}
    assert report.duration_s == pytest.approx(7.52)
    assert report.requests_per_s == pytest.approx(2 / 7.52)
    assert report.output_tokens_per_s == pytest.approx(6 / 7.52)
    assert (report.num_prompt_tokens, report.num_output_tokens) == (20, 6)
    assert [value for value, _ in report.ttft_samples] == pytest.approx([2.1, 4.82])
    assert report.ttft.mean == pytest.approx(3.46)
    assert report.itl.count == 4 and [report.itl.mean, report.itl.max] == pytest.approx([1.1, 1.1])
    assert [report.queue_time.p50, report.queue_time.max] == pytest.approx([0.0, 3.8])
    assert [report.latency.p50, report.latency.max] == pytest.approx([4.3, 7.02])
    assert report.num_steps == 7 and report.busy_share == pytest.approx(1.0)
    assert report.step_s.max == pytest.approx(1.1)
    assert report.mean_decode_rows == pytest.approx(4 / 7)
    assert report.budget_share == pytest.approx((10 + 2 + 4) / (7 * 8))
    assert report.num_hit_tokens == 8 and report.hit_rate == pytest.approx(8 / 20)
    # r1 waits from 0.5 to 4.3 s, one request runs all the time.
    assert report.waiting_mean == pytest.approx(3.8 / 7.52) and report.running_mean == pytest.approx(1.0)
    assert (report.waiting_peak, report.running_peak) == (1, 1)
    # Three blocks of 16 are in use all the time; 12 slots hold 10, then 11, then 12 tokens.
    assert report.used_share == pytest.approx(3 / 16)
    empty = 2 * (2.1 + 1.02) + 1 * (1.1 + 1.1)
    assert report.waste_share == pytest.approx(empty / (12 * 7.52))
    assert report.num_preemptions == report.num_requeues == report.num_recomputed_tokens == 0
    assert report.workers[0].num_tokens == 6 and report.unfinished == 0


def test_two_plans_in_flight_hide_the_hops() -> None:
    """With one plan in flight every step waits for a result, the leader and a plan; with two it does not."""
    slow = LatencyModel(base_s=0.1, decode_row_s=0.0, prefill_token_s=0.0, hop_s=0.02, leader_s=0.01)
    trace = [request(0, 0.0, output=(Piece("o", 40),))]
    waiting = simulate(config(plan_ahead=1), workers(), trace, slow)
    hidden = simulate(config(plan_ahead=2), workers(), trace, slow)
    assert waiting.itl.p50 == pytest.approx(0.15, abs=0.002)
    assert hidden.itl.p50 == pytest.approx(0.1, abs=0.002)
    assert hidden.busy_share > 0.98 > 0.7 > waiting.busy_share


def test_copies_take_time() -> None:
    model = LatencyModel(
        base_s=0.0, decode_row_s=0.0, prefill_token_s=0.0, context_token_s=0.0, copy_bytes_per_s=1000.0
    )
    from services.scheduler.simulator.latency import StepLoad

    assert model.step_s(StepLoad(copied_blocks=3), block_bytes=500) == pytest.approx(1.5)


FAST = LatencyModel(base_s=0.01, decode_row_s=0.001, prefill_token_s=0.001)


def crowd(count: int = 40) -> Trace:
    return generate("poisson:rate=20,prompt=40,output=30", requests=count)


def test_preemptions_are_counted_and_everybody_ends() -> None:
    report = simulate(config(max_model_len=400, max_num_seqs=16, plan_ahead=2), workers(num_blocks=85), crowd(), FAST)
    assert report.num_preemptions > 0 and report.num_recomputed_tokens > 0
    assert report.finished["stop"] + report.finished["length"] == 40
    assert report.used_share_peak > 0.9


def test_a_killed_worker_and_one_that_comes_back() -> None:
    changes = [
        WorkerChange(at=0.8, action="kill", worker="worker-0"),
        WorkerChange(at=2.0, action="join", worker="worker-0"),
    ]
    calm = simulate(config(max_model_len=400, max_num_seqs=8), workers(2, 200), crowd(), FAST)
    report = simulate(config(max_model_len=400, max_num_seqs=8), workers(2, 200), crowd(), FAST, changes=changes)
    assert report.num_requeues > 0 and report.unfinished == 0
    assert report.num_output_tokens == calm.num_output_tokens, "a token was lost or came twice"
    assert report.itl.max > calm.itl.max


def test_a_drained_worker_takes_nothing_more() -> None:
    changes = [WorkerChange(at=0.5, action="drain", worker="worker-1")]
    report = simulate(config(max_model_len=400, max_num_seqs=8), workers(2, 200), crowd(), FAST, changes=changes)
    assert report.unfinished == 0 and report.workers[1].num_tokens < report.workers[0].num_tokens / 4


def test_without_a_worker_requests_stay_unfinished() -> None:
    changes = [WorkerChange(at=2.0, action="kill", worker="worker-0")]
    report = simulate(config(max_model_len=400), workers(num_blocks=200), crowd(), HAND, changes=changes)
    assert report.unfinished == 40 - sum(report.finished.values()) > 0


def test_a_client_that_leaves_aborts() -> None:
    report = simulate(config(), workers(), [request(0, 0.0, output=(Piece("o", 30),), abort_at=5.0)], HAND)
    assert report.finished["abort"] == 1 and 0 < report.num_output_tokens < 30


def test_what_can_never_fit_is_rejected() -> None:
    report = simulate(
        config(), workers(num_blocks=4), [request(0, 0.0), request(1, 1.0, prompt=(Piece("p", 20),))], HAND
    )
    assert (report.finished["rejected"], report.finished["length"]) == (1, 1)


def test_the_next_turn_hits_the_last_answer() -> None:
    first = request(0, 0.0, output=(Piece("answer", 9),))
    assert isinstance(first.prompt, tuple) and isinstance(first.output, tuple)
    second = request(1, 2.0, prompt=(*first.prompt, *first.output, Piece("more", 4)), after="r0")
    report = simulate(config(), workers(), [first, second], HAND)
    assert report.num_hit_tokens == 16, "four full blocks of prompt and answer; the last token was never computed"


def test_choices_share_their_prompt() -> None:
    """Four choices of one prompt of 40 tokens: it is computed once."""
    trace = [request(0, 0.0, prompt=(Piece("p", 40),), num_choices=4)]
    report = simulate(config(max_num_seqs=4, max_num_batched_tokens=64), workers(num_blocks=64), trace, HAND)
    assert report.finished["length"] == 4 and report.num_output_tokens == 12
    assert report.budget_share * report.num_steps * 64 < 40 + 4 * 3 + 40, "the prompt was computed more than once"


def test_a_worker_needs_a_name_of_its_own() -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        simulate(config(), [*workers(), *workers()], crowd(), HAND)
    with pytest.raises(ConfigError, match="no worker 'worker-7'"):
        simulate(config(), workers(), crowd(), HAND, changes=[WorkerChange(at=0, action="kill", worker="worker-7")])


def small_report() -> Report:
    trace = generate("chat:rate=3,turns=3,prompt=20,output=25,system=50,think=1", requests=60, seed=3)
    changes = [WorkerChange(at=3.0, action="kill", worker="worker-1")]
    return simulate(
        config(max_model_len=600, max_num_seqs=8, max_num_batched_tokens=64),
        workers(2, 90),
        trace,
        FAST,
        changes=changes,
    )


def test_equal_seeds_give_equal_reports_whatever_the_hash_seed() -> None:
    script = (
        "import json\nfrom tests.unit.scheduler.simulator.test_simulate import small_report\n"
        "print(json.dumps(small_report().to_dict()))"
    )
    root = Path(__file__).parents[4]
    here = json.dumps(small_report().to_dict())
    assert json.loads(here)["num_requeues"] > 0
    for seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


def test_another_seed_gives_another_report() -> None:
    one, other = (
        simulate(
            config(max_model_len=400),
            workers(num_blocks=200),
            generate("poisson:prompt=40,output=20", requests=20, seed=seed),
        )
        for seed in (0, 1)
    )
    assert one != other


def test_swapped_requests_come_back_without_computing_again() -> None:
    """Preemption by swap: what was copied out comes back, and nearly nothing is computed twice."""
    spec = [WorkerSpec(name="w", num_blocks=85, num_cpu_blocks=400, block_bytes=4096)]
    options = {"max_model_len": 400, "max_num_seqs": 16, "plan_ahead": 2, "demotion": False}
    by_swap = simulate(config(preemption=Preemption.SWAP, **options), spec, crowd(), FAST)
    again = simulate(config(preemption=Preemption.RECOMPUTE, **options), spec, crowd(), FAST)
    assert by_swap.num_preemptions > 0 and by_swap.swapped_in_blocks > 0 and by_swap.swapped_out_blocks > 0
    assert again.num_preemptions > 0 and again.swapped_out_blocks == 0
    assert by_swap.num_recomputed_tokens < again.num_recomputed_tokens
    assert by_swap.num_output_tokens == again.num_output_tokens


def test_a_target_bounds_the_gaps_of_streams_beside_a_long_prompt() -> None:
    """Case 82, by the rates that the simulated worker tells: a step of 8 rows takes 0.11 s, one of 512 tokens 1.5 s."""
    latency = LatencyModel(context_token_s=0.0, hop_s=0.0, leader_s=0.0)
    streams = [request(n, 0.0, output=(Piece(f"o{n}", 60),)) for n in range(8)]
    long = request(8, 2.0, prompt=(Piece("long", 3_000),), output=(Piece("o8", 1),))
    options = {"max_model_len": 4_096, "max_num_seqs": 16, "max_num_batched_tokens": 512}

    def largest_gap(itl_target_s: float) -> float:
        chosen = config(itl_target_s=itl_target_s, **options)
        return simulate(chosen, workers(num_blocks=2_048), [*streams, long], latency).itl.max

    assert largest_gap(0.3) <= 0.3 + 1e-6 < 1.3 < largest_gap(0.0)
