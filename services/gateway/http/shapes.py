"""The JSON of answers: chat and completion, whole and in chunks. A request's `id` and `created` never change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.streams.sequences import Progress
from shared.messages import Submission

Json = dict[str, Any]


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, choice: int) -> Json | None:
        """The chunk before the first text of a choice, if there is one."""
        ...

    def chunk(self, progress: Progress) -> Json:
        """A piece of one choice."""
        ...

    def bare_chunk(self) -> Json:
        """A chunk without choices, for the usage."""
        ...

    def whole(self, choices: Sequence[Progress]) -> Json:
        """The complete answer; the progress of a choice holds its whole text."""
        ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`chat.completion` and `chat.completion.chunk`."""

    request_id: str
    model: str
    created: int

    def _head(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def opening(self, choice: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return self._head("chat.completion.chunk", [self._choice(choice, delta, None)])

    def _choice(self, index: int, delta: Json, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def chunk(self, progress: Progress) -> Json:
        delta = {"content": progress.text} if progress.text else {}
        choice = self._choice(progress.choice, delta, progress.finish_reason)
        if progress.finish_reason is not None:
            choice["stop_reason"] = progress.stop_reason
        return self._head("chat.completion.chunk", [choice])

    def bare_chunk(self) -> Json:
        return self._head("chat.completion.chunk", [])

    def whole(self, choices: Sequence[Progress]) -> Json:
        return self._head("chat.completion", [self._whole_choice(p) for p in choices])

    def _whole_choice(self, progress: Progress) -> Json:
        return {
            "index": progress.choice,
            "message": {"role": "assistant", "content": progress.text, "refusal": None},
            "logprobs": None,
            "finish_reason": progress.finish_reason,
            "stop_reason": progress.stop_reason,
        }


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """`text_completion`, whole and in chunks."""

    request_id: str
    model: str
    created: int

    def _head(self, choices: list[Json]) -> Json:
        head = {"id": self.request_id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def opening(self, choice: int) -> Json | None:
        return None

    def chunk(self, progress: Progress) -> Json:
        return self._head([self._choice(progress)])

    def bare_chunk(self) -> Json:
        return self._head([])

    def whole(self, choices: Sequence[Progress]) -> Json:
        return self._head([self._choice(p) for p in choices])

    def _choice(self, progress: Progress) -> Json:
        choice = {"index": progress.choice, "text": progress.text, "logprobs": None}
        choice["finish_reason"] = progress.finish_reason
        if progress.finish_reason is not None:
            choice["stop_reason"] = progress.stop_reason
        return choice


def shape_of(first: Submission) -> Shape:
    """How a response is written: as its first request says, whose id is the response's."""
    kind = ChatShape if first.kind == "chat" else CompletionShape
    return kind(first.request_id, first.model, int(first.created))
