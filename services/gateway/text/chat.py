"""Chat templates, rendered as Transformers renders them, in a sandbox.

The template comes from the model's folder, never from a request.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, InvalidRequest

_END_MARK = "\ue000end-of-final-message\ue001"
"""Stands behind the message to continue while rendering (private-use characters around it)."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what training learns; for a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. Rendering keeps no state: threads may share it.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, clock: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text. `continue_final_message` ends it right behind the last message's content.

        Raises:
            InvalidRequest: the template refuses the messages; the message is the template's.
        """
        if not continue_final_message:
            return self._render(list(messages), add_generation_prompt)
        *before, last = messages
        rendered = self._render([*before, {**last, "content": last["content"] + _END_MARK}], False)
        text, mark, _ = rendered.rpartition(_END_MARK)
        if not mark:
            raise InvalidRequest("the chat template drops the message to continue", param="continue_final_message")
        return text

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # a fault of template code on input that it did not expect
            raise InvalidRequest("the chat template cannot render these messages", param="messages") from error
