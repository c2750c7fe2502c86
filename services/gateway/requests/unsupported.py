"""Fields that clients know and we do not serve (yet): accepted if the value asks for nothing, else refused by name.

To ignore such a field would be to answer another question than the one that was asked.
"""

from collections.abc import Container, Mapping
from typing import Any

from shared.errors import InvalidRequest

Neutral = Mapping[str, tuple[Any, ...]]
"""Field → values that ask for nothing. Null always does."""

COMMON: Neutral = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}

COMPLETION: Neutral = {
    **COMMON,
    "echo": (False,),
    "logprobs": (),
    "prompt_embeds": (),
    "suffix": ("",),
}

CHAT: Neutral = {
    **COMMON,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}

MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""Of a message: what the official client puts into an assistant message that is sent back."""


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Null, or equal to a neutral value; true and false equal no number."""
    return value is None or any(
        value == candidate and isinstance(value, bool) == isinstance(candidate, bool) for candidate in neutral
    )


def without_neutral(data: dict[str, Any], table: Neutral) -> tuple[dict[str, Any], str | None]:
    """`data` without the fields of `table`, and the first of them that asks for something."""
    asking = next((name for name in data if name in table and not asks_for_nothing(data[name], table[name])), None)
    return {name: value for name, value in data.items() if name not in table}, asking


def with_one_unknown(data: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """`data` without its unknown fields, except the first, which is the one to be named: the validator would make an
    error of each, without letting other threads run."""
    unknown = (name for name in data if name not in known)
    next(unknown, None)
    excess = set(unknown)
    return {name: value for name, value in data.items() if name not in excess} if excess else data


def unsupported(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: not supported yet", param=name, code="unsupported_parameter")
