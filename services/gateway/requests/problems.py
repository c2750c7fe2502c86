"""Validation errors: short, naming the field, without the client's input."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from shared.errors import InvalidRequest

_MESSAGES = {"extra_forbidden": "unknown field", "missing": "required"}


def problem(message: str, *, at: str = "") -> PydanticCustomError:
    """What a field's validator raises. `at` is the place inside the field, like `[2].type`."""
    return PydanticCustomError("invalid_value", "{text}", {"text": message, "at": at})


def field_path(location: Sequence[int | str]) -> str:
    """`("messages", 0, "content")` → `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def to_invalid_request(error: ValidationError) -> InvalidRequest:
    """The first problem of `error`, as the client is told."""
    first: Any = error.errors(include_url=False, include_input=False)[0]
    param = field_path(first["loc"]) + first.get("ctx", {}).get("at", "")
    message = _MESSAGES.get(first["type"], first["msg"])
    return InvalidRequest(f"{_shortened(param)}: {message}", param=_shortened(param))


def _shortened(text: str, limit: int = 128) -> str:
    """Field names are the client's: an unknown one may be of any length."""
    shown = text if len(text) <= limit else text[:limit] + "…"
    return shown.encode("utf-8", "replace").decode()
