"""A conversation in the terminal."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from services.cli.http_api import stream_chat
from services.cli.resuming import ServerError

HELP = "/exit ends, /clear forgets the conversation, Ctrl-C stops an answer"


@dataclass(slots=True)
class Conversation:
    """The messages so far and how to ask for the next."""

    url: str
    model: str
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    api_key: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """The request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        options = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        given = {name: value for name, value in options.items() if value is not None}
        return {"model": self.model, "messages": system + self.messages, **given}

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer to `text`. What arrived is remembered, also if the caller stops early."""
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            with contextlib.closing(_generator(self)) as pieces:
                for piece in pieces:
                    answer.append(piece)
                    yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()


def _generator(conversation: Conversation) -> Any:
    return stream_chat(conversation.url, conversation.body(), conversation.api_key)


def answer_once(conversation: Conversation, question: str, out: TextIO) -> None:
    """Write the answer to one question.

    Raises:
        ServerError: as `stream_chat`.
    """
    for piece in conversation.ask(question):
        out.write(piece)
        out.flush()
    out.write("\n")


def converse(conversation: Conversation, out: TextIO) -> None:
    """Read questions until /exit or Ctrl-D. An error ends the answer, not the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    print(HELP, file=out)
    while (question := _read_question(out)) is not None:
        if question == "/clear":
            conversation.messages.clear()
        elif question:
            _show_answer(conversation, question, out)


def _read_question(out: TextIO) -> str | None:
    """The next line; None to end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=out)
        return None
    return None if line == "/exit" else line


def _show_answer(conversation: Conversation, question: str, out: TextIO) -> None:
    try:
        answer_once(conversation, question, out)
    except KeyboardInterrupt:
        print(" [stopped]", file=out)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
