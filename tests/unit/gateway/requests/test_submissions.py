"""From bodies to submissions: prompts, context, vocabulary (BEST-05, case 56, 57, 58)."""

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.gateway.requests.bodies import ChatBody, CompletionBody, read_body
from services.gateway.requests.choices import MAX_SEQUENCES
from services.gateway.requests.submissions import build_submissions
from services.gateway.text.model_files import ModelText
from services.gateway.text.tokenizer import TextTokenizer
from shared.capacity import most_blocks, most_tokens
from shared.errors import InvalidRequest, RequestTooLarge
from shared.messages import Submission
from shared.packing import unpack_int32
from shared.sampling import SamplingParams

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
MAX_LEN = 32
VOCAB_SIZE = 270
BOS = 0
A = 66
"""The letter a."""


def make_tokenizer() -> TextTokenizer:
    """One token per byte, BOS before each text; the model has a few ids more than the tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: index + 2 for index, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return TextTokenizer(inner, ModelText(VOCAB_SIZE, MAX_LEN, (1,), special, TEMPLATE))


TOKENIZER = make_tokenizer()
assert TOKENIZER.encode("a", add_special_tokens=False) == [A]


@dataclass(frozen=True)
class PoolLimits:
    max_model_len: int = MAX_LEN
    max_request_tokens: int = 0
    cap_requests: int = 0
    max_rows: int = 0
    max_blocks: int = 0
    block_size: int = 0


def build(body: CompletionBody | ChatBody, limits: PoolLimits = PoolLimits(), seed: int = 1) -> list[Submission]:
    rng = random.Random(seed)
    return build_submissions(body, TOKENIZER, limits, request_id="r", created=5.0, model="served", rng=rng, tenant="t")


def completion(prompt: Any = "hi", limits: PoolLimits = PoolLimits(), **fields: Any) -> list[Submission]:
    return build(read_body(CompletionBody, {"model": "m", "prompt": prompt, **fields}), limits)


def chat(content: str = "hi", **fields: Any) -> list[Submission]:
    return build(read_body(ChatBody, {"messages": [{"role": "user", "content": content}], **fields}))


def prompt_of(submission: Submission) -> list[int]:
    return list(unpack_int32(submission.prompt_tokens))


def text_of(submission: Submission) -> str:
    return TOKENIZER.decode(prompt_of(submission), skip_special_tokens=False)


def test_a_submission_holds_what_was_asked() -> None:
    (submission,) = completion(
        [5, 6],
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=9,
        stop=["a", "b"],
        stop_token_ids=[3],
        logit_bias={"7": 1, "4": -2.5},
        ignore_eos=True,
    )
    assert (submission.request_id, submission.model, submission.kind) == ("r", "served", "completion")
    assert (submission.created, submission.tenant, submission.stop) == (5.0, "t", ("a", "b"))
    assert prompt_of(submission) == [5, 6]
    params = submission.params
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 9)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.1)
    assert params.logit_bias == ((4, -2.5), (7, 1.0))
    assert params.stop_token_ids == (3,) and params.ignore_eos


def test_the_cache_salt_goes_with_the_submission() -> None:
    assert [s.cache_salt for s in (*completion("a"), *completion("a", cache_salt="x"), *chat(cache_salt="y"))] == [
        "",
        "x",
        "y",
    ]


def test_defaults_sample_from_the_unchanged_distribution_and_fill_the_context() -> None:
    for (submission,) in (completion([5, 6]), completion([5, 6], max_tokens=None)):
        params = submission.params
        assert params.max_tokens == MAX_LEN - 2
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
        assert not params.is_greedy


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-9, True), (9e-6, True), (1e-5, False), (1, False)])
def test_a_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert completion(temperature=temperature)[0].params.is_greedy is greedy


def test_a_seed_is_drawn_for_each_prompt_if_none_is_given() -> None:
    body = read_body(CompletionBody, {"prompt": ["a", "b"]})
    seeds = [submission.params.seed for submission in build(body, seed=3)]
    assert seeds == [submission.params.seed for submission in build(body, seed=3)]
    assert len({*seeds, *(submission.params.seed for submission in build(body, seed=4))}) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert {submission.params.seed for submission in completion(["a", "b"], seed=8)} == {8}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a", ["<s>a"]), (["a", "b"], ["<s>a", "<s>b"]), ([BOS, A], ["<s>a"]), ([[A], [A + 1]], ["a", "b"])],
)
def test_prompt_forms_become_submissions_in_order(prompt: Any, texts: list[str]) -> None:
    """Case 57."""
    submissions = completion(prompt)
    assert [text_of(submission) for submission in submissions] == texts
    assert [s.request_id for s in submissions] == ["r", "r-1"][: len(texts)]


def test_exactly_one_bos() -> None:
    """Case 58: a text prompt gets one, also if it brings one along; a chat has the template's; ids are as sent."""
    assert text_of(completion("a")[0]) == "<s>a"
    assert text_of(completion("<s>a")[0]) == "<s>a"
    assert text_of(completion("a", add_special_tokens=False)[0]) == "a"
    assert prompt_of(completion([BOS, BOS, A])[0]) == [BOS, BOS, A]
    assert text_of(chat("a")[0]) == "<s>user:a\n>"


def test_chat_is_rendered() -> None:
    assert chat("hi")[0].kind == "chat"
    assert text_of(chat("hi", add_generation_prompt=False)[0]) == "<s>user:hi\n"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    body = read_body(ChatBody, {"messages": messages, "continue_final_message": True})
    assert text_of(build(body)[0]) == "<s>user:a\nassistant:b "


@pytest.mark.parametrize("form", ["NFC é", "NFD e\u0301"])
def test_text_is_not_normalised(form: str) -> None:
    assert text_of(completion(form)[0]) == f"<s>{form}"


# ---------------------------------------------------------------- context


@pytest.mark.parametrize(("length", "fits"), [(MAX_LEN - 1, True), (MAX_LEN, False), (MAX_LEN + 1, False)])
@pytest.mark.parametrize("as_text", [True, False])
def test_prompts_around_the_context_length(length: int, fits: bool, as_text: bool) -> None:
    """Case 56."""
    prompt: Any = "a" * (length - 1) if as_text else [A] * length  # the text gets a BOS
    if fits:
        (submission,) = completion(prompt, max_tokens=1)
        assert len(prompt_of(submission)) == length
        return
    with pytest.raises(RequestTooLarge) as error:
        completion(prompt, max_tokens=1)
    assert str(MAX_LEN) in error.value.message and str(length) in error.value.message
    assert (error.value.param, error.value.status) == ("prompt", 400)
    assert error.value.code == "context_length_exceeded"


def test_max_tokens_over_the_context_names_all_numbers() -> None:
    assert completion([A] * 10, max_tokens=22)[0].params.max_tokens == 22
    with pytest.raises(RequestTooLarge) as error:
        completion([A] * 10, max_tokens=23)
    assert error.value.param == "max_tokens"
    assert all(number in error.value.message for number in ("10", "23", "33", str(MAX_LEN)))


def test_a_pool_that_holds_less_than_the_context_limits_too() -> None:
    small = PoolLimits(max_request_tokens=16)
    assert completion([A] * 10, small)[0].params.max_tokens == 6
    with pytest.raises(RequestTooLarge, match="16"):
        completion([A] * 10, small, max_tokens=7)
    unknown = PoolLimits(max_model_len=0)
    assert completion([A] * 10, unknown)[0].params.max_tokens == MAX_LEN - 10, "the model's own length"


def test_min_tokens_over_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequest) as error:
        completion([A] * 30, min_tokens=3)
    assert error.value.param == "min_tokens"


def test_a_hopeless_text_is_refused_without_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextTokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    for make in (completion, chat):
        with pytest.raises(RequestTooLarge, match=str(MAX_LEN)):
            make("a" * 100_000)


def test_one_bad_prompt_of_several_refuses_all_and_is_named() -> None:
    with pytest.raises(InvalidRequest) as error:
        completion([[A], [A, VOCAB_SIZE]])
    assert error.value.param == "prompt[1]"


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5, 2**31]}, "prompt"),
        ({"prompt": [10**5000]}, "prompt"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any], param: str) -> None:
    """BEST-05."""
    with pytest.raises(InvalidRequest) as error:
        completion(**fields)
    assert error.value.param == param and param in error.value.message
    assert str(VOCAB_SIZE - 1) in error.value.message and len(error.value.message) < 200


def test_ids_up_to_the_models_vocabulary_are_accepted() -> None:
    last = VOCAB_SIZE - 1
    (submission,) = completion([0, last], stop_token_ids=[last], logit_bias={str(last): 1})
    assert prompt_of(submission) == [0, last]


def test_a_text_that_the_model_cannot_read_is_refused() -> None:
    """A tokenizer with more ids than the model has embeddings."""
    TOKENIZER.vocab_size, before = 50, TOKENIZER.vocab_size
    try:
        with pytest.raises(InvalidRequest) as error:
            completion("a")
        assert error.value.param == "prompt"
    finally:
        TOKENIZER.vocab_size = before


# ---------------------------------------------------------------- several choices


def test_every_choice_is_a_request_of_its_own_in_one_group() -> None:
    submissions = completion("hi", n=3, temperature=0.8)
    assert [s.request_id for s in submissions] == ["r", "r#1", "r#2"]
    assert {s.group for s in submissions} == {"r"}
    assert [s.params.choice for s in submissions] == [0, 1, 2]
    assert len({s.params.seed for s in submissions}) == 1 and len({s.prompt_tokens for s in submissions}) == 1
    assert not any(s.params.with_logprobs or s.params.beam_width for s in submissions)


@pytest.mark.parametrize("make", [completion, chat])
def test_choice_k_is_the_same_request_whatever_n_is(make: Any) -> None:
    """BEST-18 over choices: what choice k draws by (seed, choice, index) does not know of the others."""
    three, five = make(n=3, seed=7), make(n=5, seed=7)
    assert three == five[:3]
    (alone,) = make(n=1, seed=7)
    assert alone.params == five[0].params and alone.group == ""


def test_choices_of_several_prompts_are_prompt_major() -> None:
    """Case 57."""
    submissions = completion([[5], [6, 7]], n=2)
    assert [s.request_id for s in submissions] == ["r", "r#1", "r-1", "r-1#1"]
    assert [s.group for s in submissions] == ["r", "r", "r-1", "r-1"]
    assert [s.params.choice for s in submissions] == [0, 1, 0, 1]
    assert [prompt_of(s) for s in submissions] == [[5], [5], [6, 7], [6, 7]]
    seeds = [s.params.seed for s in submissions]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_candidates_report_their_logprobs_and_know_how_many_are_returned() -> None:
    candidates = completion("hi", n=2, best_of=4)
    assert [(s.params.with_logprobs, s.params.num_hypotheses) for s in candidates] == [(True, 2)] * 4
    assert not any(s.params.with_logprobs for s in completion("hi", n=2, best_of=2))


@pytest.mark.parametrize("make", [completion, chat])
def test_a_beam_search_is_one_request(make: Any) -> None:
    (submission,) = make(n=2, best_of=4, use_beam_search=True, length_penalty=0.5)
    params = submission.params
    assert (params.beam_width, params.num_hypotheses, params.length_penalty) == (4, 2, 0.5)
    assert (submission.request_id, submission.group, params.with_logprobs) == ("r", "", False)
    assert make(n=3, use_beam_search=True)[0].params.beam_width == 3


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        completion(**fields)
    assert error.value.param is not None and error.value.message.startswith(error.value.param)
    return error.value


def test_what_can_never_be_queued_together_is_refused() -> None:
    """Cases 49 and 87: bounded over all prompts, and n counts as n."""
    tight = PoolLimits(cap_requests=4)
    assert len(completion([[5], [6]], tight, n=2)) == 4
    assert refused(prompt=[[5], [6]], limits=tight, n=3).param == "n"
    assert refused(prompt="a", limits=tight, best_of=5).param == "best_of"
    assert refused(prompt=["a"] * 5, limits=tight).param == "prompt"
    assert len(completion("a", tight, n=5, use_beam_search=True)) == 1  # one request
    assert len(completion([[5]] * 128, n=2)) == MAX_SEQUENCES
    assert refused(prompt=[[5]] * 128, n=3).param == "n"


def test_a_long_prompt_is_not_multiplied_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.requests.choices.MAX_QUEUED_TOKENS", 40)
    assert len(completion([5] * 10, n=4)) == 4
    error = refused(prompt=[5] * 10, n=5)
    assert error.param == "n" and "50" in error.message and "40" in error.message


def test_beams_are_refused_by_rows_and_by_blocks_before_they_are_queued() -> None:
    """What the scheduler would reject later; the limit of `max_tokens` is exact."""
    small = PoolLimits(max_rows=4, max_blocks=20, block_size=4)
    beam_search: dict[str, Any] = {"use_beam_search": True, "prompt": [5] * 9, "limits": small}
    assert refused(**beam_search, n=5).param == "n"
    assert refused(**beam_search, best_of=5).param == "best_of"
    (longest,) = completion(**beam_search, n=4)
    assert longest.params.max_tokens == 15  # 2 shared blocks and 4 times 4 more: 6 blocks, 24 tokens
    assert most_blocks(9, longest.params, 4) <= 20
    over = msgspec.structs.replace(longest.params, max_tokens=16)
    assert most_blocks(9, over, 4) > 20
    error = refused(**beam_search, n=4, max_tokens=16)
    assert error.param == "max_tokens" and "24 with 4 beams" in error.message
    tiny = PoolLimits(max_rows=4, max_blocks=4, block_size=4)
    error = refused(**{**beam_search, "limits": tiny}, n=4)
    assert error.param == "prompt" and error.code == "context_length_exceeded"
    assert completion([5] * 9, tiny, n=4)[0].params.max_tokens == MAX_LEN - 9  # forks need not run together


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 7, 8, 31])
@pytest.mark.parametrize("num_beams", [1, 2, 5])
def test_the_longest_request_fits_and_one_token_more_does_not(num_prompt_tokens: int, num_beams: int) -> None:
    for num_blocks in range(1, 40):
        longest = most_tokens(num_prompt_tokens, num_beams, 4, num_blocks) - num_prompt_tokens
        if longest >= 1:
            fitting = SamplingParams(max_tokens=longest, seed=1, beam_width=num_beams)
            assert most_blocks(num_prompt_tokens, fitting, 4) <= num_blocks
        over = SamplingParams(max_tokens=max(1, longest + 1), seed=1, beam_width=num_beams)
        assert most_blocks(num_prompt_tokens, over, 4) > num_blocks
