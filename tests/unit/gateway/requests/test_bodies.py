"""Bodies: what is accepted, what is refused by which name (BEST-05, BEST-17, BEST-21, case 66)."""

import math
import time
from typing import Any

import pytest
from pydantic import ValidationError

from services.gateway.requests.bodies import ChatBody, CompletionBody, GenerationBody, read_body
from services.gateway.requests.fields import MAX_PROMPTS
from services.gateway.requests.parameter_table import parameter_table
from shared.errors import InvalidRequest
from shared.sampling import NUMERIC_PARAMS

MESSAGES = [{"role": "user", "content": "hi"}]
NAN = float("nan")


def completion(**fields: Any) -> CompletionBody:
    return read_body(CompletionBody, {"model": "m", "prompt": "hi", **fields})


def chat(**fields: Any) -> ChatBody:
    return read_body(ChatBody, {"model": "m", "messages": MESSAGES, **fields})


ENDPOINTS = pytest.mark.parametrize("make", [completion, chat])


def refusal(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        make(**fields)
    assert error.value.status == 400
    assert error.value.param is not None and error.value.param in error.value.message
    assert len(error.value.message) < 400, "short, whatever the input"
    return error.value


ACCEPTED = [
    ("temperature", 0),
    ("temperature", 1e-9),
    ("temperature", 2),
    ("temperature", 0.7),
    ("top_p", 1),
    ("top_p", 1e-6),
    ("top_k", 0),
    ("top_k", -1),
    ("top_k", 10**9),
    ("min_p", 0),
    ("min_p", 1.0),
    ("presence_penalty", 2),
    ("presence_penalty", -2.0),
    ("frequency_penalty", -2),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 10),
    ("n", 1),
    ("max_tokens", 1),
    ("max_tokens", 2**31 - 1),
    ("min_tokens", 0),
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("stop", []),
    ("stop", "x"),
    ("stop", ["x"] * 16),
    ("stop_token_ids", []),
    ("logit_bias", {}),
    ("logit_bias", {"5": -100, "0": 100.0}),
    ("stream", True),
    ("ignore_eos", True),
    ("cache_salt", "s" * 256),
    ("cache_salt", ""),
    ("user", "someone"),
    ("metadata", {"a": "b"}),
    ("store", False),
    ("service_tier", "auto"),
]


@ENDPOINTS
@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_accepts_documented_values(make: Any, name: str, value: Any) -> None:
    make(**{name: value})


@ENDPOINTS
@pytest.mark.parametrize("name", sorted({name for name, _ in ACCEPTED} | {"stream_options"}))
def test_null_is_the_default(make: Any, name: str) -> None:
    assert make(**{name: None}) == make()


REFUSED = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.0001),
    ("top_k", -2),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("best_of", 0),
    ("best_of", 129),
    ("use_beam_search", 1),
    ("length_penalty", 10.5),
    ("n", 10**9),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 2**63),
    ("max_tokens", 10**30),
    ("max_tokens", 16.0),
    ("max_tokens", "16"),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 2**64),
    ("seed", 1.5),
    ("seed", "7"),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", [0.5]),
    ("temperature", 10**400),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop", ["x"] * 10**5),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", "x" * 1025),
    ("stop", "\ud800"),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [5] * 129),
    ("stop_token_ids", 5),
    ("logit_bias", {"5": 100.1}),
    ("logit_bias", {"5": NAN}),
    ("logit_bias", {"5": math.inf}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {"٥": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [[5, 1]]),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 0),
    ("cache_salt", "s" * 257),
    ("cache_salt", 5),
    ("cache_salt", "\ud800"),
    ("user", 5),
    ("user", "\udc00"),
    ("model", 5),
    ("model", "m\ud83d"),
]


@ENDPOINTS
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refuses_and_names_the_field(make: Any, name: str, value: Any) -> None:
    assert refusal(make, **{name: value}).param == name


@ENDPOINTS
@pytest.mark.parametrize("spec", NUMERIC_PARAMS, ids=lambda spec: spec.name)
def test_every_number_of_the_table_is_a_field_with_its_range(make: Any, spec: Any) -> None:
    """Case 47: a range check that NaN or an infinity passes is none."""
    assert spec.name in type(make()).model_fields
    for value in (NAN, math.inf, -math.inf):
        assert refusal(make, **{spec.name: value}).param == spec.name
    below = spec.low if spec.low_open else spec.low - 1
    assert spec.range in refusal(make, **{spec.name: below}).message
    assert refusal(make, **{spec.name: spec.type(spec.high + 1)}).param == spec.name
    others = {"use_beam_search": True} if spec.name == "length_penalty" else {}
    make(**{spec.name: spec.type(spec.high)}, **others)


@ENDPOINTS
def test_best_of_is_at_least_n_and_not_streamed(make: Any) -> None:
    for n, best_of, candidates in ((None, None, 1), (3, None, 3), (3, 3, 3), (3, 5, 5), (None, 2, 2)):
        body = make(n=n, best_of=best_of)
        assert (body.num_choices, body.num_candidates) == (n or 1, candidates)
    assert refusal(make, n=3, best_of=2).param == "best_of"
    assert refusal(make, n=2, best_of=3, stream=True).param == "best_of"
    make(n=3, best_of=3, stream=True)
    make(n=2, best_of=3, stream=False)


@ENDPOINTS
def test_a_beam_search_refuses_what_only_sampling_knows(make: Any) -> None:
    assert refusal(make, length_penalty=0.5).param == "length_penalty"
    make(length_penalty=1.0)
    contradictions = [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 1),
        ("frequency_penalty", 1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"1": 1}),
    ]
    for name, value in contradictions:
        make(**{name: value})
        assert refusal(make, use_beam_search=True, **{name: value}).param == name
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "seed": 1, "stop": "x", "stop_token_ids": [1]}
    body = make(use_beam_search=True, n=2, best_of=32, length_penalty=0.0, stream=True, **neutral)
    assert (body.num_choices, body.num_candidates) == (2, 32)
    assert refusal(make, use_beam_search=True, best_of=33).param == "best_of"
    assert refusal(make, use_beam_search=True, n=33).param == "n"
    assert refusal(make, use_beam_search=True, n=3, best_of=2).param == "best_of"


@ENDPOINTS
def test_fields_together(make: Any) -> None:
    assert refusal(make, min_tokens=6, max_tokens=5).param == "min_tokens"
    make(min_tokens=5, max_tokens=5)
    assert refusal(make, stream=False, stream_options={}).param == "stream_options"
    options = make(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).stream_options
    assert options.include_usage and options.continuous_usage_stats is None
    unknown = refusal(make, stream=True, stream_options={"usage": True})
    assert unknown.param == "stream_options.usage"


@ENDPOINTS
@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("skip_special_tokens", True, False),
        ("include_stop_str_in_output", False, True),
        ("prompt_logprobs", None, 5),
        ("guided_regex", None, "(a+)+$"),
        ("structured_outputs", None, {"json": {"type": "nonsense"}}),
        ("allowed_token_ids", [], [1]),
    ],
)
def test_what_is_not_served_is_refused_unless_it_asks_for_nothing(
    make: Any, name: str, neutral: Any, asking: Any
) -> None:
    assert make(**{name: neutral}) == make()
    error = refusal(make, **{name: asking})
    assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("echo", False, True),
        ("suffix", "", "x"),
        ("logprobs", None, 0),
        ("logprobs", None, 21),
        ("logprobs", None, 10**6),
    ],
)
def test_not_served_by_completions(name: str, neutral: Any, asking: Any) -> None:
    completion(**{name: neutral})
    assert refusal(completion, **{name: asking}).param == name


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("logprobs", False, True),
        ("logprobs", None, 0),
        ("top_logprobs", 0, 21),
        ("tools", [], [{"type": "function"}]),
        ("tool_choice", "none", "auto"),
        ("functions", None, [{}]),
        ("modalities", ["text"], ["audio"]),
        ("audio", None, {"voice": "x"}),
        ("chat_template", None, "{% for i in range(25000) %}{% endfor %}"),
        ("chat_template_kwargs", {}, {"chat_template": "x"}),
        ("reasoning_effort", None, "high"),
    ],
)
def test_not_served_by_chat(name: str, neutral: Any, asking: Any) -> None:
    chat(**{name: neutral})
    assert refusal(chat, **{name: asking}).param == name


@ENDPOINTS
def test_a_misspelt_field_is_refused(make: Any) -> None:
    error = refusal(make, max_token=5)
    assert error.param == "max_token" and "unknown field" in error.message
    assert len(refusal(make, **{"x" * 10_000: 1}).param or "") < 200
    assert refusal(make, **{"\ud800": 1}).message.isprintable()


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"messages": MESSAGES}, "x0"),
        ({"messages": MESSAGES, "stream_options": {}}, "stream_options.x0"),
        ({"messages": [dict(MESSAGES[0])]}, "messages[0].x0"),
    ],
)
def test_of_many_unknown_fields_one_is_an_error(data: dict[str, Any], param: str) -> None:
    """A body of 13 MB with a million of them stopped every stream for 17 s and took 1 GB: the validator made an error
    of each while it held the interpreter."""
    unknown = {f"x{i}": 1 for i in range(1000)}
    place = {"x0": data, "stream_options.x0": data.get("stream_options"), "messages[0].x0": data["messages"][0]}[param]
    place |= unknown
    with pytest.raises(ValidationError) as error:
        ChatBody.model_validate(data)
    assert error.value.error_count() == 1
    assert refusal(read_body, kind=ChatBody, data=data).param == param


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize("data", [None, [], "x", 5, {}])
def test_what_is_no_body(kind: type[GenerationBody], data: Any) -> None:
    with pytest.raises(InvalidRequest):
        read_body(kind, data)


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2, 3], [[1, 2, 3]]), ([[1, 2], [3]], [[1, 2], [3]]), (" ", [" "])],
)
def test_prompt_forms(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt"),
        ([1, True], "prompt"),
        ([True], "prompt[0]"),
        ([1.0], "prompt[0]"),
        ([[1], ["a"]], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[[1]]], "prompt[0]"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ("a\ud800", "prompt"),
        (["a", "\udfff"], "prompt[1]"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
    ],
)
def test_bad_prompts(prompt: Any, param: str) -> None:
    assert refusal(completion, prompt=prompt).param == param


def test_a_missing_prompt_or_message_list_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt: required"):
        read_body(CompletionBody, {"model": "m"})
    with pytest.raises(InvalidRequest, match="messages: required"):
        read_body(ChatBody, {"model": "m"})


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("role", ["system", "user", "assistant", "developer"])
def test_parts_are_joined_for_every_role(role: str) -> None:
    """BEST-21: without a separator, never silently empty."""
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    (message,) = chat(messages=[{"role": role, "content": parts}]).messages
    assert message.content == "AB"
    assert message.for_template() == {"role": "system" if role == "developer" else role, "content": "AB"}


def test_a_message_of_the_official_client_can_be_sent_back() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert chat(messages=[answer]).messages[0].for_template() == {"role": "assistant", "content": "x"}
    named = {"role": "user", "content": "", "name": "n"}
    assert chat(messages=[named]).messages[0].for_template() == named


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([*MESSAGES, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}], "messages[0].content[0].more"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": "\ud800"}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
    ],
)
def test_bad_messages(messages: Any, param: str) -> None:
    """Case 131 among them: nothing is fetched, so a part that is no text is refused."""
    assert refusal(chat, messages=messages).param == param


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert chat(max_completion_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=5).token_limit == 5
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=NAN).param == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=3, min_tokens=4).param == "min_tokens"
    assert refusal(completion, max_completion_tokens=5).param == "max_completion_tokens"


def test_continuing_the_final_message() -> None:
    """Case 64."""
    history = [*MESSAGES, {"role": "assistant", "content": "Sure: "}]
    assert chat(messages=history, continue_final_message=True).continue_final_message
    both = refusal(chat, messages=history, continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"
    assert refusal(chat, continue_final_message=True).param == "continue_final_message"


# ---------------------------------------------------------------- size


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"] * 10**6},
        {"stop_token_ids": [1] * 10**6},
        {"logit_bias": {str(i): 1 for i in range(10**5)}},
        {"prompt": ["x"] * 10**6},
        {"tools": [{}] * 10**5},
        {"zzz": [[0]] * 10**5},
        {f"f{i}": i for i in range(10**4)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_huge_lists_are_refused_before_they_are_read(fields: dict[str, Any]) -> None:
    begin = time.thread_time()
    refusal(completion, **fields)
    assert time.thread_time() - begin < 0.5


def test_many_bad_messages_cost_one_error() -> None:
    begin = time.thread_time()
    assert refusal(chat, messages=[{"role": "wizard"}] * 9_999).param == "messages[0].role"
    assert refusal(chat, messages=MESSAGES * 10_001).param == "messages"
    assert time.thread_time() - begin < 0.5


def test_parameter_table_has_every_number() -> None:
    table = parameter_table()
    assert all(f"| `{spec.name}` |" in table for spec in NUMERIC_PARAMS)
    assert "| `top_p` | number | 1 | (0, 1] |" in table
