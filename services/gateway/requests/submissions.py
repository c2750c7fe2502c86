"""From a checked body to submissions: render, tokenize, check what needs the vocabulary and the context's length."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from services.gateway.requests.bodies import ChatBody, CompletionBody, GenerationBody
from services.gateway.requests.choices import RequestLimits, check_room, context_with_beams
from services.gateway.requests.fields import Prompt
from services.gateway.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequest, RequestTooLarge
from shared.messages import Submission
from shared.packing import pack_int32
from shared.records import choice_id
from shared.sampling import SamplingParams

SEED_BITS = 63


class SeedSource(Protocol):
    """`random.Random` and `random.SystemRandom` are such."""

    def getrandbits(self, bits: int, /) -> int: ...


def build_submissions(
    body: CompletionBody | ChatBody,
    tokenizer: TextTokenizer,
    limits: RequestLimits,
    *,
    request_id: str,
    created: float,
    model: str,
    rng: SeedSource,
    tenant: str = "",
    traceparent: str = "",
) -> list[Submission]:
    """One submission per candidate, prompt-major; a beam search is one submission.

    The id of the first candidate of the first prompt is `request_id`, that of another prompt `<request_id>-<i>`; those
    of the other candidates follow from it (`choice_id`).

    Heavy on the CPU (tokenizing releases the GIL): call it outside the event loop, unless the body is short.

    Raises:
        InvalidRequest: a token id outside the vocabulary, a refusal by the chat template, too many sequences.
        RequestTooLarge: prompt and `max_tokens` do not fit the context.
    """
    _check_vocabulary(body, tokenizer)
    context = context_length(tokenizer, limits)
    if isinstance(body, ChatBody):
        kind, field, prompts = "chat", "messages", _chat_prompt(body, tokenizer, context)
    else:
        check_room(body, [0] * len(body.prompt), limits)  # before the work of tokenizing
        kind, field, prompts = "completion", "prompt", _prompts(body, tokenizer, context)
    check_room(body, [len(tokens) for tokens in prompts], limits)
    submissions: list[Submission] = []
    for index, tokens in enumerate(prompts):
        room = context_with_beams(body, len(tokens), context, limits)
        max_tokens = _max_tokens(body, len(tokens), room, field)
        first = Submission(
            request_id=f"{request_id}-{index}" if index else request_id,
            model=model,
            kind=kind,
            created=created,
            prompt_tokens=pack_int32(tokens),
            params=_sampling_params(body, max_tokens, rng),
            stop=body.stop,
            priority=body.number("priority"),
            tenant=tenant,
            traceparent=traceparent,
            cache_salt=body.cache_salt or "",
            deadlines=body.deadlines,
        )
        submissions += _candidates(first, 1 if body.use_beam_search else body.num_candidates)
    return submissions


def _candidates(first: Submission, count: int) -> list[Submission]:
    """`count` requests that differ in their choice only: same prompt, same seed, one group."""
    if count == 1:
        return [first]
    replace = msgspec.structs.replace
    return [
        replace(
            first,
            request_id=choice_id(first.request_id, choice),
            group=first.request_id,
            params=replace(first.params, choice=choice),
        )
        for choice in range(count)
    ]


def context_length(tokenizer: TextTokenizer, limits: RequestLimits) -> int:
    """Most tokens of prompt and output together: the model's, or what fits the largest worker."""
    lengths = (limits.max_model_len or tokenizer.max_model_len, limits.max_request_tokens)
    return min(length for length in lengths if length > 0)


# ---------------------------------------------------------------- prompts


def _chat_prompt(body: ChatBody, tokenizer: TextTokenizer, context: int) -> list[list[int]]:
    continues = bool(body.continue_final_message)
    text = tokenizer.render_chat(
        [message.for_template() for message in body.messages],
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
    )
    return [_checked(_encode(text, tokenizer, context, field="messages", special=False), tokenizer, "messages")]


def _prompts(body: CompletionBody, tokenizer: TextTokenizer, context: int) -> list[list[int]]:
    several = len(body.prompt) > 1
    names = (f"prompt[{index}]" if several else "prompt" for index in range(len(body.prompt)))
    special = body.add_special_tokens is not False
    return [_tokens(prompt, tokenizer, context, name, special) for prompt, name in zip(body.prompt, names, strict=True)]


def _tokens(prompt: Prompt, tokenizer: TextTokenizer, context: int, field: str, special: bool) -> list[int]:
    if isinstance(prompt, str):
        return _checked(_encode(prompt, tokenizer, context, field=field, special=special), tokenizer, field)
    if len(prompt) >= context:
        raise _too_long(len(prompt), context, field)
    return _checked(prompt, tokenizer, field)


def _encode(text: str, tokenizer: TextTokenizer, context: int, *, field: str, special: bool) -> list[int]:
    """Token ids of `text`. A BOS that the text itself begins with is not doubled."""
    least = tokenizer.least_tokens(text)
    if least >= context:
        message = f"{field}: at least {least} tokens, but prompt and output together may have {context}"
        raise RequestTooLarge(message, param=field)
    tokens = tokenizer.encode(text, add_special_tokens=special)
    bos = tokenizer.bos_token_id
    return tokens[1:] if special and bos is not None and tokens[:2] == [bos, bos] else tokens


def _checked(tokens: list[int], tokenizer: TextTokenizer, field: str) -> list[int]:
    if not tokens:
        raise InvalidRequest(f"{field}: yields no tokens", param=field)
    _check_ids(tokens, tokenizer.vocab_size, field)
    return tokens


# ---------------------------------------------------------------- vocabulary and context


def _check_vocabulary(body: GenerationBody, tokenizer: TextTokenizer) -> None:
    _check_ids(body.stop_token_ids, tokenizer.vocab_size, "stop_token_ids")
    _check_ids([token for token, _ in body.logit_bias], tokenizer.vocab_size, "logit_bias")


def _check_ids(tokens: Iterable[int], vocab_size: int, field: str) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            shown = token if abs(token) < 2**64 else "a larger number"
            raise InvalidRequest(f"{field}: token ids are 0 to {vocab_size - 1}, got {shown}", param=field)


def _max_tokens(body: GenerationBody, num_prompt_tokens: int, context: int, field: str) -> int:
    """The output limit of one prompt; absent, it fills the context."""
    if num_prompt_tokens >= context:
        raise _too_long(num_prompt_tokens, context, field, _of_beams(body))
    room = context - num_prompt_tokens
    max_tokens = room if body.token_limit is None else body.token_limit
    if max_tokens > room:
        message = (
            f"max_tokens: {num_prompt_tokens} prompt tokens and max_tokens = {max_tokens} make "
            f"{num_prompt_tokens + max_tokens}, but prompt and output together may have {context}{_of_beams(body)}"
        )
        raise RequestTooLarge(message, param="max_tokens")
    if body.number("min_tokens") > max_tokens:
        message = f"min_tokens: {body.min_tokens}, but only {max_tokens} output tokens fit the context of {context}"
        raise RequestTooLarge(message, param="min_tokens")
    return max_tokens


def _of_beams(body: GenerationBody) -> str:
    """Why the context may be shorter than usual."""
    return f" with {body.num_candidates} beams" if body.use_beam_search else ""


def _too_long(num_prompt_tokens: int, context: int, field: str, beams: str = "") -> RequestTooLarge:
    message = (
        f"{field}: {num_prompt_tokens} prompt tokens leave no room for output: "
        f"prompt and output together may have {context} tokens{beams}"
    )
    return RequestTooLarge(message, param=field)


def _sampling_params(body: GenerationBody, max_tokens: int, rng: SeedSource) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=rng.getrandbits(SEED_BITS) if body.seed is None else body.seed,
        min_tokens=body.number("min_tokens"),
        temperature=body.number("temperature"),
        top_p=body.number("top_p"),
        top_k=max(0, body.number("top_k")),
        min_p=body.number("min_p"),
        presence_penalty=body.number("presence_penalty"),
        frequency_penalty=body.number("frequency_penalty"),
        repetition_penalty=body.number("repetition_penalty"),
        logit_bias=body.logit_bias,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        with_logprobs=not body.use_beam_search and body.num_candidates > body.num_choices,
        beam_width=body.num_candidates if body.use_beam_search else 0,
        length_penalty=body.number("length_penalty"),
        num_hypotheses=body.num_choices if body.use_beam_search or body.num_candidates > body.num_choices else 1,
    )
