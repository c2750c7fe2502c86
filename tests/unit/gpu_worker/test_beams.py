"""Beam rows: a small search on top of the engine finds what Transformers' beam search finds."""

import random

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from shared.errors import ProtocolError
from shared.messages import BeamRow, BlockCopies, CopyKind, EndReason, NewRow, StepPlan, Tick
from shared.packing import NO_TOKEN, pack_int32, unpack_int32
from shared.sampling import SamplingParams
from tests.fakes.beam_search import BeamSearch
from tests.fakes.engine_driver import EngineDriver, owns_blocks
from tests.fakes.tiny_llama import EOS, VOCAB_SIZE

TICK = Tick(0, "0-0", "0-0", 0.0)
SEARCH = SamplingParams(max_tokens=20, seed=0, temperature=0.0, beam_width=4)


def with_params(**changes) -> SamplingParams:
    return msgspec.structs.replace(SEARCH, **changes)


def prompt_of(size: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{seed}/{size}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def by_transformers(
    peer: LlamaForCausalLM, prompt: list[int], params: SamplingParams, endings: list[int]
) -> list[tuple[list[int], float]]:
    """(output, score) of all beams, best first."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens,
            length_penalty=params.length_penalty,
            early_stopping=False,
            do_sample=False,
            eos_token_id=endings or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = [cut_after_ending(row[len(prompt) :].tolist(), endings) for row in found.sequences]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def cut_after_ending(output: list[int], endings: list[int]) -> list[int]:
    """Without the padding behind it."""
    ends = [place for place, token in enumerate(output) if token in endings]
    return output[: ends[0] + 1] if ends else output


CASES: dict[str, tuple[int, dict, list[int]]] = {
    "four beams": (23, {}, []),
    "two beams, block boundary at the first token": (24, {"beam_width": 2}, []),
    "five beams, one before a boundary": (31, {"beam_width": 5}, []),
    "one token": (17, {"max_tokens": 1}, []),
    "long": (5, {"max_tokens": 60}, []),
    "many endings": (40, {"beam_width": 3}, list(range(100, 160))),
    "many endings, no penalty": (9, {"length_penalty": 0.0}, list(range(100, 140))),
    "many endings, long ones favoured": (9, {"length_penalty": 1.3}, list(range(100, 140))),
    "short ones favoured": (9, {"length_penalty": -1.0}, list(range(100, 140))),
    "endings masked at first": (40, {"beam_width": 3, "min_tokens": 7}, list(range(100, 200))),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_beam_search_of_transformers(case: str, tiny, make_driver) -> None:
    size, changes, endings = CASES[case]
    params = with_params(**changes, stop_token_ids=tuple(endings), ignore_eos=True)
    engine = make_driver(max_num_seqs=9, num_blocks=60).engine
    search = BeamSearch(engine, prompt_of(size), params)
    found = search.run(chunk_size=11)
    expected = by_transformers(tiny.peer, prompt_of(size), params, endings)
    assert [beam.output for beam in found] == [output for output, _ in expected]
    np.testing.assert_allclose([beam.score for beam in found], [score for _, score in expected], rtol=1e-4)
    if params.max_tokens > 1:
        assert search.num_forks > 0, "siblings must have needed copies of a block"
    if endings:
        assert any(len(beam.output) < params.max_tokens for beam in found), "some must have ended early"
        assert all(len(beam.output) > params.min_tokens for beam in found)
    assert not any(owns_blocks(engine, row) for row in range(9))


def test_candidates_are_the_best_tokens_in_order(tiny, make_driver) -> None:
    """Twice as many as beams, by log-probability; endings are marked; a forward pass of Transformers has the same."""
    driver = make_driver()
    prompt = prompt_of(30)
    with torch.inference_mode():
        logprobs = tiny.peer(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    order = logprobs.argsort(descending=True, stable=True)[:8].tolist()
    params = with_params(stop_token_ids=(order[1], order[3]))
    result = driver.engine.step(first_plan(prompt, params))
    (found,) = result.candidates
    tokens = np.frombuffer(found.tokens, "<i4").tolist()
    assert tokens == [-1 - token if place in (1, 3) or token == EOS else token for place, token in enumerate(order)]
    np.testing.assert_allclose(np.frombuffer(found.logprobs, "<f4"), logprobs[order], rtol=1e-4)


def first_plan(prompt: list[int], params: SamplingParams, row: int = 0) -> StepPlan:
    """Blocks 0, 1, … of 8 tokens."""
    new = NewRow(row, "beams", pack_int32(prompt), len(prompt), 0, params)
    pairs = [number for block in range(-(-len(prompt) // 8)) for number in (row, block)]
    return StepPlan(1, TICK, added=(new,), blocks=pack_int32(pairs), chunks=((row, len(prompt)),))


def test_equal_logprobs_are_ordered_by_token() -> None:
    from services.gpu_worker.sampling.candidates import BeamSampler

    logits = torch.zeros(2, 50)
    logits[0, [7, 40]] = 3.0
    best = BeamSampler(50, (EOS,)).best(logits, [with_params(beam_width=2)] * 2, np.zeros(2, np.int64))
    assert [row.tokens.tolist() for row in best if row] == [[7, 40, 0, 1], [0, 1, -1 - EOS, 3]]


def test_beams_that_are_not_named_stand_still_while_others_decode(tiny, make_driver) -> None:
    driver = make_driver()
    other = driver.add("other", prompt_of(33), SamplingParams(max_tokens=12, seed=0, temperature=0.0, ignore_eos=True))
    driver.step()
    engine = driver.engine
    free = [block for block in range(200) if block not in other.blocks][:6]
    prompt = prompt_of(20)
    new = NewRow(5, "beams", pack_int32(prompt), 20, 0, SEARCH)
    pairs = [*(number for block in free[:3] for number in (5, block))]
    result = engine.step(StepPlan(2, TICK, added=(new,), blocks=pack_int32(pairs), chunks=((5, 20),)))
    (before,) = result.candidates
    assert len(result.tokens) == 4 and [row for row, _, _ in result.joined] == []
    steps = [result]
    for plan_id in range(3, 8):
        steps.append(engine.step(StepPlan(plan_id, TICK)))
        assert steps[-1].candidates == ()
    token = abs(int(np.frombuffer(before.tokens, "<i4")[0]))
    result = engine.step(StepPlan(8, TICK, beams=(BeamRow(5, 5, token),)))
    assert [found.row for found in result.candidates] == [5]
    outputs = [unpack_int32(step.tokens)[0] for step in (*steps, result)]
    assert [*other.output, *outputs] == tiny.expected(prompt_of(33), 8)
    with torch.inference_mode():
        expected = tiny.peer(torch.tensor([[*prompt, token]])).logits[0, -1].log_softmax(-1)
    found = np.frombuffer(result.candidates[0].tokens, "<i4")
    assert np.where(found < 0, -1 - found, found).tolist() == expected.topk(8).indices.tolist()
    assert engine.step(StepPlan(9, TICK, dropped=(0, 5))).left == (0,), "readers never knew of the beam"


def test_a_beam_may_enter_as_a_row_that_has_output(tiny, make_driver) -> None:
    """It is prefilled with prompt and output, and has the candidates that it had."""
    driver = make_driver()
    engine, prompt = driver.engine, prompt_of(20)
    engine.step(first_plan(prompt, SEARCH))
    beams = (BeamRow(1, 0, 50), BeamRow(2, 0, 60, 10))
    copies = (BlockCopies(CopyKind.WITHIN, pack_int32([2, 10])),)
    before = engine.step(StepPlan(2, TICK, dropped=(0,), beams=beams, copies=copies)).candidates
    engine.step(StepPlan(3, TICK, dropped=(1, 2)))
    known = {4: [*prompt, 50], 5: [*prompt, 60]}
    rows = tuple(NewRow(row, "beams", pack_int32(tokens), 20, 0, SEARCH) for row, tokens in known.items())
    pairs = [number for row in (4, 5) for block in range(3) for number in (row, 20 + 3 * row + block)]
    plan = StepPlan(4, TICK, added=rows, blocks=pack_int32(pairs), chunks=((4, 21), (5, 21)))
    after = engine.step(plan).candidates
    assert [found.row for found in after] == [4, 5]
    for old, new in zip(before, after, strict=True):
        assert old.tokens == new.tokens
        np.testing.assert_allclose(np.frombuffer(old.logprobs, "<f4"), np.frombuffer(new.logprobs, "<f4"), rtol=1e-4)


def test_min_tokens_masks_endings_without_changing_the_others(make_driver) -> None:
    endings = tuple(range(0, VOCAB_SIZE, 2))
    going = []
    for min_tokens in (0, 1):
        params = with_params(stop_token_ids=endings, min_tokens=min_tokens)
        (found,) = make_driver().engine.step(first_plan(prompt_of(20), params)).candidates
        pairs = zip(np.frombuffer(found.tokens, "<i4").tolist(), np.frombuffer(found.logprobs, "<f4"), strict=True)
        values = dict(pairs)
        assert any(token < 0 for token in values) == (min_tokens == 0)
        going.append({token: value for token, value in values.items() if token >= 0})
    assert going[0] and going[1].items() > going[0].items()


@pytest.mark.parametrize(
    "changes", [{"logit_bias": ((5, 1.0),)}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.2}, {"beam_width": -1}]
)
def test_parameters_that_a_search_cannot_honour_end_it(changes: dict, make_driver) -> None:
    engine = make_driver().engine
    result = engine.step(first_plan(prompt_of(20), with_params(**changes)))
    assert result.ended == ((0, EndReason.ERROR),) and result.candidates == ()
    assert not owns_blocks(engine, 0)


def test_logits_that_are_not_finite_end_the_beam_and_no_other(make_driver) -> None:
    """Row 2's last block is a poisoned copy."""
    driver = make_driver()
    engine = driver.engine
    engine.step(first_plan(prompt_of(20), SEARCH))
    engine.cache.data[11] = float("nan")
    result = engine.step(
        StepPlan(
            2,
            TICK,
            beams=(BeamRow(1, 0, 50, 10), BeamRow(2, 0, 60, 11), BeamRow(0, 0, 70)),
            copies=(BlockCopies(CopyKind.WITHIN, pack_int32([2, 10])),),
        )
    )
    assert result.ended == ((2, EndReason.ERROR),)
    assert [found.row for found in result.candidates] == [1, 0]
    assert not owns_blocks(engine, 2) and owns_blocks(engine, 1)


WRONG_BEAMS: dict[str, tuple[dict, str]] = {
    "parent is free": ({"beams": (BeamRow(2, 3, 5),)}, "its parent 3 is no beam"),
    "parent decodes": ({"beams": (BeamRow(2, 1, 5),)}, "its parent 1 is no beam"),
    "row decodes": ({"beams": (BeamRow(1, 0, 5),)}, "holds decode"),
    "row out of range": ({"beams": (BeamRow(8, 0, 5),)}, "outside"),
    "parent out of range": ({"beams": (BeamRow(2, -1, 5),)}, "outside"),
    "row named twice": ({"beams": (BeamRow(2, 0, 5), BeamRow(2, 0, 6))}, "twice"),
    "row dropped too": ({"dropped": (0,), "beams": (BeamRow(0, 0, 5),)}, "dropped too"),
    "token": ({"beams": (BeamRow(0, 0, VOCAB_SIZE),)}, "does not exist"),
    "ending token": ({"beams": (BeamRow(0, 0, -3),)}, "does not exist"),
    "block": ({"beams": (BeamRow(0, 0, 5, 200),)}, "block id"),
    "two write to one block": ({"beams": (BeamRow(0, 0, 5), BeamRow(2, 0, 6))}, "two beams write"),
    "no place": ({"plan_id": 3, "beams": (BeamRow(0, 0, 5),)}, "no block for its token"),
    "chunk of a beam": ({"chunks": ((0, 1),)}, "not in prefill"),
    "added to a beam": ({"added": (NewRow(0, "x", pack_int32([5]), 1, 0, SEARCH),)}, "holds beams"),
    "of another search": ({"beams": (BeamRow(0, 4, 5),)}, "holds beams"),
}


@pytest.mark.parametrize("fault", WRONG_BEAMS)
def test_wrong_beams_are_refused_before_anything_changes(fault: str, make_driver) -> None:
    """Row 0 is a beam of 23 tokens in blocks 0 to 2, row 1 decodes, row 4 is a beam of another search."""
    changes, message = WRONG_BEAMS[fault]
    engine = make_driver().engine
    greedy = SamplingParams(max_tokens=50, seed=0, temperature=0.0, ignore_eos=True)
    added = (
        NewRow(0, "beams", pack_int32(prompt_of(23)), 23, 0, SEARCH),
        NewRow(1, "decode", pack_int32(prompt_of(3)), 3, 0, greedy),
        NewRow(4, "others", pack_int32(prompt_of(3)), 3, 0, SEARCH),
    )
    pairs = pack_int32([0, 0, 0, 1, 0, 2, 1, 3, 4, 4])
    engine.step(StepPlan(1, TICK, added=added, blocks=pairs, chunks=((0, 23), (1, 3), (4, 3))))
    if changes.get("plan_id") == 3:  # its last block is full then
        engine.step(StepPlan(2, TICK, beams=(BeamRow(0, 0, 9),)))
    before = engine.cache.data.nan_to_num().clone()
    next_id = changes.get("plan_id", 2)
    with pytest.raises(ProtocolError, match=rf"plan \d+: .*{message}"):
        engine.step(StepPlan(**{"plan_id": 2, "tick": TICK, **changes}))
    assert engine.cache.data.nan_to_num().equal(before)
    result = engine.step(StepPlan(next_id, TICK, blocks=pack_int32([0, 7]), beams=(BeamRow(0, 0, 5),)))
    assert unpack_int32(result.tokens).tolist()[0] == NO_TOKEN and len(result.candidates) == 1


def test_a_search_in_rows_with_a_neighbour_leaves_its_text_alone(tiny, make_driver) -> None:
    """After a search, the same engine serves as if nothing had been."""
    driver = make_driver()
    BeamSearch(driver.engine, prompt_of(20), SEARCH).run()
    driver = EngineDriver(driver.engine)
    driver.add("a", prompt_of(20), SamplingParams(max_tokens=12, seed=0, temperature=0.0, ignore_eos=True))
    assert driver.run()["a"] == tiny.expected(prompt_of(20), 12)
