"""The scheduler's core plans for the worker's engine, without Redis: choices, draws and beam searches."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from services.gpu_worker.engine import Engine
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.outcomes import Finished
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import StepPlan, Submission, WorkerJoined
from shared.packing import pack_int32, unpack_int32
from shared.records import choice_id
from shared.sampling import SamplingParams
from tests.fakes.tiny_llama import EOS, VOCAB_SIZE

BLOCK_SIZE = 8


def prompt_of(size: int) -> list[int]:
    draw = np.random.default_rng(size)
    return [int(token) for token in draw.integers(3, VOCAB_SIZE, size)]


def submission(name: str, prompt: Sequence[int], params: SamplingParams, group: str = "") -> Submission:
    return Submission(name, "tiny", "completion", 0.0, pack_int32(prompt), params, group=group)


def serve(engine: Engine, core: SchedulerCore, submissions: Sequence[Submission]) -> dict[str, Finished]:
    """All of them to their ends, with two plans in flight."""
    engine.begin("w", 1)
    core.on_worker_joined(WorkerJoined("w", 1, engine.cache.num_blocks, engine.pool.num_blocks))
    for each in submissions:
        core.add_request(each)
    in_flight: deque[StepPlan] = deque()
    while True:
        while (scheduled := core.schedule(0.0)) is not None:
            in_flight.append(scheduled.plan)
        if not in_flight:
            break
        core.update_from_result(engine.step(in_flight.popleft()))
        core.check_integrity()
        assert not core.broken_workers()
    assert core.is_idle
    return {end.request_id: end for end in core.take_finished()}


def make_core(**options: object) -> SchedulerCore:
    sizes = {"max_model_len": 256, "block_size": BLOCK_SIZE, "max_num_seqs": 8}
    return SchedulerCore(SchedulerConfig(**sizes, **options))  # type: ignore[arg-type]


def by_transformers(peer: LlamaForCausalLM, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], float]]:
    """(output, score), best first; outputs end with their ending."""
    ids, endings = torch.tensor([prompt]), [EOS, *params.stop_token_ids]
    with torch.inference_mode():
        found = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.num_hypotheses,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=False,
            do_sample=False,
            eos_token_id=endings,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [place for place, token in enumerate(row) if token in endings]
        outputs.append(row[: ends[0] + 1] if ends else row)
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("num_blocks", [200, 18])
def test_beam_searches_for_eight_prompts_equal_those_of_transformers(num_blocks: int, tiny, make_driver) -> None:
    """Prompt lengths at the end of a block and one beside it, beside each other, with room and with preemptions."""
    searches = {}
    for index, size in enumerate((15, 16, 17, 5, 40, 23, 24, 33)):
        width = 2 + index % 3
        params = SamplingParams(
            max_tokens=24,
            seed=0,
            temperature=0.0,
            beam_width=width,
            num_hypotheses=width,
            length_penalty=(1.0, 0.0, 1.3)[index % 3],
            stop_token_ids=tuple(range(100, 140)) if index % 2 else (),
        )
        searches[f"s{index}"] = submission(f"s{index}", prompt_of(size), params)
    engine = make_driver(num_blocks=num_blocks).engine
    core = make_core(enable_prefix_caching=False, admission_room=0)
    ends = serve(engine, core, list(searches.values()))
    for name, search in searches.items():
        final = ends[name].final
        found = [unpack_int32(hypothesis.tokens).tolist() for hypothesis in final.hypotheses]
        expected = by_transformers(tiny.peer, unpack_int32(search.prompt_tokens).tolist(), search.params)
        assert found == [output for output, _ in expected], name
        scores = [hypothesis.score for hypothesis in final.hypotheses]
        np.testing.assert_allclose(scores, [score for _, score in expected], rtol=1e-4)
        assert unpack_int32(ends[name].output).tolist() == found[0]
    assert any(end.final.num_output_tokens < 24 for end in ends.values()), "no search ended early"
    assert (core.stats().num_preemptions > 0) == (num_blocks < 100)


@pytest.mark.parametrize("size", [15, 16, 17, 18])
def test_greedy_choices_of_a_prompt_all_have_its_text(size: int, tiny, make_driver) -> None:
    """Each is a fork whose blocks the others share, and computes one token of the prompt."""
    engine = make_driver().engine
    core = make_core(enable_prefix_caching=False)
    prompt = prompt_of(size)
    params = [
        SamplingParams(max_tokens=20, seed=0, temperature=0.0, ignore_eos=True, choice=choice, with_logprobs=True)
        for choice in range(4)
    ]
    choices = [submission(choice_id("r", index), prompt, each, group="r") for index, each in enumerate(params)]
    ends = serve(engine, core, choices)
    assert core.stats().num_forks == 3
    assert core.stats().num_forked_blocks == 3 * ((size - 1) // BLOCK_SIZE)
    expected = tiny.expected(prompt, 20)
    assert {tuple(unpack_int32(end.output)) for end in ends.values()} == {tuple(expected)}
    with torch.inference_mode():
        logprobs = tiny.peer(torch.tensor([prompt + expected])).logits[0].log_softmax(-1)
    known = sum(float(logprobs[size - 1 + index, token]) for index, token in enumerate(expected))
    for end in ends.values():
        assert end.final.cumulative_logprob == pytest.approx(known, rel=1e-4)


SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.6},
    {"top_p": 0.9, "repetition_penalty": 1.3},
    {"top_k": 20, "presence_penalty": 0.8, "frequency_penalty": 0.5, "min_tokens": 30},
    {"min_p": 0.05, "stop_token_ids": tuple(range(100, 108))},
)


def test_draws_of_choices_are_those_that_each_would_have_alone(make_driver) -> None:
    """`n` = 3 with a seed, forked, preempted, swapped and demoted, in chunks and beside others: the choice, the output
    index and the penalties' counts go with each request."""
    requests = []
    for number in range(10):
        prompt = prompt_of((15, 16, 17, 40, 33)[number % 5])  # each comes twice, so the cache is hit
        for choice in range(3):
            changes: dict[str, Any] = {"max_tokens": 18 + 3 * number, "choice": choice, **SAMPLED[number // 2]}
            params = SamplingParams(seed=7 + number % 3, **changes)
            requests.append(submission(choice_id(f"r{number}", choice), prompt, params, group=f"r{number}"))
    alone: dict[str, bytes] = {}
    engine = make_driver().engine
    for request in requests:
        alone |= outputs(serve(engine, make_core(enable_prefix_caching=False), [request]))
    assert len(set(alone.values())) == len(requests) and len({len(output) for output in alone.values()}) > 11
    for preemption in (Preemption.SWAP, Preemption.RECOMPUTE):
        core = make_core(preemption=preemption, admission_room=0, max_num_batched_tokens=24)
        host = 40 if preemption is Preemption.SWAP else 0
        crowded = serve(make_driver(num_blocks=22, num_cpu_blocks=host).engine, core, requests)
        assert outputs(crowded) == alone
        stats = core.stats()
        assert stats.num_preemptions >= 10 and stats.num_forks >= 10 and stats.prefix_cache_hits > 0
        assert (stats.num_swap_ins > 20 and stats.num_promotions > 0) == (preemption is Preemption.SWAP)


def outputs(ends: dict[str, Finished]) -> dict[str, bytes]:
    return {request_id: end.output for request_id, end in ends.items()}
