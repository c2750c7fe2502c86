"""Synthetic traces and traces from files."""

import itertools
import statistics
from pathlib import Path

import pytest

from services.scheduler.simulator import Piece, TraceRequest
from services.scheduler.simulator.generators import GENERATORS, generate
from services.scheduler.simulator.trace import check_trace, num_tokens, tokens_of
from services.scheduler.simulator.trace_files import read_lines
from shared.errors import ConfigError
from shared.packing import unpack_int32


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_seeds_give_equal_traces(name: str) -> None:
    one, same, other = (generate(name, requests=80, seed=seed) for seed in (5, 5, 6))
    assert list(one) == list(same) != list(other)
    assert len(one) == 80
    check_trace(one)


def test_poisson_arrives_at_its_rate_with_its_lengths() -> None:
    trace = generate("poisson:rate=8,prompt=200,output=100", requests=4000)
    assert trace[-1].arrival == pytest.approx(500, rel=0.1)
    assert statistics.mean(num_tokens(request.prompt) for request in trace) == pytest.approx(200, rel=0.1)
    assert statistics.mean(num_tokens(request.output) for request in trace) == pytest.approx(100, rel=0.1)


def test_a_turn_begins_with_all_that_was_said() -> None:
    trace = generate("chat:turns=3,systems=2", requests=30)
    by_id = {request.request_id: request for request in trace}
    followers = [request for request in trace if request.after]
    assert len(followers) == 20
    for request in followers:
        before = by_id[request.after]
        assert tokens_of(request.prompt).startswith(tokens_of(before.prompt) + tokens_of(before.output))
    firsts = {tokens_of(request.prompt)[: 4 * 400] for request in trace if not request.after}
    assert len(firsts) == 2, "two system prompts"


def test_questions_share_their_document() -> None:
    trace = generate("long_document:documents=3,document=500", requests=40)
    assert len({request.prompt[0] for request in trace}) == 3
    assert len({tokens_of(request.prompt) for request in trace}) == 40


def test_bursts_come_at_once() -> None:
    trace = generate("bursty:burst=40,pause=100", requests=200)
    gaps = [later.arrival - sooner.arrival for sooner, later in itertools.pairwise(trace)]
    assert sum(gap < 1 for gap in gaps) > 180 and max(gaps) > 20


def test_two_kinds_of_prompts() -> None:
    lengths = sorted(num_tokens(r.prompt) for r in generate("bimodal:share=0.25,prompt=50,long=5000", requests=400))
    assert lengths[250] < 400 and lengths[350] > 1000


def test_tenants_take_turns() -> None:
    assert {request.tenant for request in generate("poisson:tenants=3", requests=9)} == {
        "tenant-0",
        "tenant-1",
        "tenant-2",
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "neither a file nor one of"),
        ("chat:colour=3", "has no 'colour'"),
        ("chat:turns=many", "'many' is not a positive int"),
        ("poisson:rate=0", "'0' is not a positive float"),
        ("poisson:rate=nan", "'nan' is not a positive float"),
    ],
)
def test_a_bad_spec_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(spec)


def test_a_file_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"arrival": 10.5, "prompt_tokens": 1500, "output_tokens": 9, "prefix_ids": [7, "x"], "tenant": "t"}\n\n'
        '{"timestamp": 11000, "input_length": 1100, "output_length": 5, "hash_ids": [7, "x", 9], "priority": -2}\n'
        '{"id": "late", "arrival": 2, "after": "r1", "prompt_tokens": 3, "output_tokens": 4, "max_tokens": 8, "n": 2}\n'
    )
    first, second, late = read_lines(file)
    assert [r.arrival for r in (first, second, late)] == [0.0, 0.5, 2.0]
    assert (first.tenant, second.priority, late.after, late.limit, late.num_choices) == ("t", -2, "r1", 8, 2)
    assert [num_tokens(r.prompt) for r in (first, second, late)] == [1500, 1100, 3]
    one, other = unpack_int32(tokens_of(first.prompt)), unpack_int32(tokens_of(second.prompt))
    assert one[:1024] == other[:1024] and one[1024] != other[1024]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "line 2"),
        ('{"arrival": 1, "prompt_tokens": 5}', "line 2: output_tokens is missing"),
        ('{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 2: prompt_tokens must be at least 1"),
        ('{"prompt_tokens": 5, "output_tokens": 1}', "line 2: arrival is missing"),
        ('{"arrival": 1, "prompt_tokens": 5, "output_tokens": 1, "colour": 3}', "line 2: .*colour"),
        ('{"arrival": 1, "prompt_tokens": 5, "output_tokens": 1, "after": "r7"}', "'r7', which is not before it"),
        ('{"arrival": -1, "prompt_tokens": 5, "output_tokens": 1}', "its arrival is no time"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival": 1, "prompt_tokens": 5, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_lines(file)


def test_a_trace_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_lines(tmp_path / "none.jsonl")


def test_choices_have_outputs_of_their_own() -> None:
    request = TraceRequest(
        request_id="r", arrival=0, prompt=(Piece("p", 4),), output=(Piece("o", 3),), num_choices=3, max_tokens=5
    )
    made = request.submissions()
    assert [submission.request_id for submission, _ in made] == ["r", "r#1", "r#2"]
    assert {submission.group for submission, _ in made} == {"r"}
    assert [submission.params.choice for submission, _ in made] == [0, 1, 2]
    assert len({bytes(output) for _, output in made}) == 3
