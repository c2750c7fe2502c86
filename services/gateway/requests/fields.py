"""The types of body fields that are more than a number. Counts are checked before contents, contents before meaning."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PlainValidator

from services.gateway.requests.problems import problem
from shared.sampling import MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

MAX_PROMPTS = 128
"""Prompts in one body; each is a request of its own."""
MAX_BIAS = 100.0

TokenPrompt = list[int]
Prompt = str | TokenPrompt

_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


def well_formed(text: str, *, at: str = "") -> str:
    """Text as it came: nothing is normalised. Lone surrogates have no UTF-8 form and are refused."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise problem("ill-formed Unicode (a lone surrogate)", at=at) from None
    return text


def parse_stop(value: Any) -> tuple[str, ...]:
    """A string, a list of strings or null."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise problem("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise problem(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
    for stop in stops:
        if not isinstance(stop, str):
            raise problem("must be a string or a list of strings")
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise problem(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, got {len(stop)}")
        well_formed(stop)
    return tuple(stops)


def parse_stop_token_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids or null; the vocabulary is checked later."""
    tokens = [] if value is None else value
    if not isinstance(tokens, list):
        raise problem("must be a list of token ids")
    if len(tokens) > MAX_STOP_TOKEN_IDS:
        raise problem(f"at most {MAX_STOP_TOKEN_IDS} token ids, got {len(tokens)}")
    if not is_token_list(tokens):
        raise problem("must be a list of token ids")
    return tuple(tokens)


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """An object of token id → bias, or null; ascending by token id. The vocabulary is checked later."""
    biases = {} if value is None else value
    if not isinstance(biases, dict):
        raise problem("must be an object of token id and bias")
    if len(biases) > MAX_LOGIT_BIAS:
        raise problem(f"at most {MAX_LOGIT_BIAS} entries, got {len(biases)}")
    return tuple(sorted(_bias(key, bias) for key, bias in biases.items()))


def _bias(key: Any, bias: Any) -> tuple[int, float]:
    if not (isinstance(key, str) and _TOKEN_KEY.fullmatch(key)):
        raise problem("keys must be token ids in decimal")
    if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise problem(f"the bias of token {key} must be a number in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
    return int(key), float(bias)


def parse_prompts(value: Any) -> list[Prompt]:
    """The four forms of a prompt: a string, strings, token ids, lists of token ids."""
    if isinstance(value, str):
        return [_text_prompt(value, "")]
    if not isinstance(value, list):
        raise problem("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise problem("must not be empty")
    if type(value[0]) is int:
        return [_token_prompt(value, "")]
    if len(value) > MAX_PROMPTS:
        raise problem(f"at most {MAX_PROMPTS} prompts, got {len(value)}")
    parse = _text_prompt if isinstance(value[0], str) else _token_prompt
    return [parse(prompt, f"[{index}]") for index, prompt in enumerate(value)]


def _text_prompt(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise problem("all prompts must be of the same form", at=at)
    if not value:
        raise problem("must not be empty", at=at)
    return well_formed(value, at=at)


def _token_prompt(value: Any, at: str) -> TokenPrompt:
    if not isinstance(value, list) or not is_token_list(value):
        raise problem("must be a list of token ids", at=at)
    if not value:
        raise problem("must not be empty", at=at)
    return value


def is_token_list(tokens: list[Any]) -> bool:
    """Whether all are integers; true and false are not."""
    return all(type(token) is int for token in tokens)


def parse_content(value: Any) -> str:
    """The text of a message: a string, or a list of text parts, which are joined without a separator."""
    if isinstance(value, str):
        return well_formed(value)
    if value is None:
        raise problem("must be a string or a list of text parts; a message without content is not supported yet")
    if not isinstance(value, list) or not value:
        raise problem("must be a string or a non-empty list of text parts")
    return "".join(_part_text(part, f"[{index}]") for index, part in enumerate(value))


def _part_text(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise problem("must be an object", at=at)
    if part.get("type") != "text":
        raise problem("only parts of type 'text' are supported", at=f"{at}.type")
    unknown = sorted(set(part) - {"type", "text"})
    if unknown:
        raise problem("unknown field", at=f"{at}.{unknown[0]}")
    if not isinstance(part.get("text"), str):
        raise problem("must be a string", at=f"{at}.text")
    return well_formed(part["text"], at=f"{at}.text")


Text = Annotated[str, AfterValidator(well_formed)]
StopStrings = Annotated[tuple[str, ...], PlainValidator(parse_stop, json_schema_input_type=str | list[str] | None)]
StopTokenIds = Annotated[tuple[int, ...], PlainValidator(parse_stop_token_ids, json_schema_input_type=list[int] | None)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(parse_logit_bias, json_schema_input_type=dict[str, float] | None)
]
Prompts = Annotated[
    list[Prompt], PlainValidator(parse_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]
Content = Annotated[
    str, PlainValidator(parse_content, json_schema_input_type=str | list[dict[Literal["type", "text"], str]])
]
