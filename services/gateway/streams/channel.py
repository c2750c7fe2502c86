"""Committed tokens of one request on their way from the log reader to its response."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.messages import FINISH_REASONS, WORKERS_DIED, EndReason, Final, FinishReason, RequestEvent
from shared.records import RequestRecord

ROLLED_BACK = ("log_rolled_back", "the message log lost this request, or a part of it that was told")
"""Code and message: Redis lost a request, or tokens that the client has and that were computed otherwise since."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why no token follows. `code` is machine-readable and set only for failures."""

    reason: FinishReason
    end_reason: EndReason | None = None
    message: str = ""
    code: str = ""

    @classmethod
    def from_worker(cls, reason: EndReason) -> "Ending":
        """A token-level ending."""
        code = "generation_failed" if reason is EndReason.ERROR else ""
        return cls(FINISH_REASONS[reason], reason, code=code)

    @classmethod
    def from_event(cls, event: RequestEvent) -> "Ending":
        """The scheduler's terminal event."""
        return cls._told(event.reason, 0, event.message)

    @classmethod
    def from_final(cls, final: Final) -> "Ending":
        """The end as the record holds it."""
        return cls._told(final.reason, final.end_reason, final.message)

    @classmethod
    def failure(cls, code: str, message: str) -> "Ending":
        """The gateway itself gives up."""
        return cls(FinishReason.ERROR, message=message, code=code)

    @classmethod
    def _told(cls, reason: str, end_reason: int, message: str) -> "Ending":
        known = FinishReason(reason) if reason in set(FinishReason) else FinishReason.ERROR
        failed = "worker_died" if message == WORKERS_DIED else "generation_failed"
        codes = {FinishReason.ERROR: failed, FinishReason.REJECTED: "rejected"}
        return cls(known, EndReason(end_reason) if end_reason else None, message, codes.get(known, ""))


class TokenChannel:
    """Holds what the response has not taken yet; never more than the request's `max_tokens`.

    Tokens that accumulate while the response is busy are taken together. Offers are idempotent: a token counts only at
    the index that equals the number of tokens offered so far. A token that was offered before must be the same again:
    another one means that Redis lost what the client has, and that it was computed anew, otherwise.
    """

    __slots__ = (
        "_all",
        "_num_taken",
        "_on_news",
        "capacity",
        "ending",
        "last_news",
        "num_cached_tokens",
        "num_quiet",
        "record",
        "request_id",
        "start_id",
        "wants_record",
    )

    def __init__(
        self,
        request_id: str,
        capacity: int,
        on_news: Callable[["TokenChannel"], None],
        *,
        wants_record: bool = False,
    ) -> None:
        self.request_id = request_id
        self.capacity = capacity
        self.wants_record = wants_record
        """Whether the answer is made from the final record: then no other ending counts, except a failure."""
        self.record: RequestRecord | None = None
        """The final one, with the ending, if it is wanted."""
        self.ending: Ending | None = None
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache held; known before the first token comes."""
        self.start_id = ""
        """Log position when the reader began to track the request: all of its tokens come later."""
        self.last_news = 0.0
        self.num_quiet = 0
        """Looks at which it had no news for long."""
        self._all = array("i")
        self._num_taken = 0
        self._on_news = on_news

    @property
    def committed(self) -> int:
        """Tokens that were offered."""
        return len(self._all)

    def offer(self, first_index: int, tokens: Sequence[int]) -> None:
        """Tokens whose first one has output index `first_index`; what is known already is skipped."""
        num_known = self.committed - first_index
        if self.ending is not None or num_known < 0:
            return
        if num_known and not self._repeats(first_index, tokens[:num_known]):
            self.end(Ending.failure(*ROLLED_BACK))
            return
        fresh = tokens[num_known : num_known + self.capacity - self.committed]
        if fresh:
            self._all.extend(fresh)
            self._on_news(self)

    def _repeats(self, first_index: int, tokens: Sequence[int]) -> bool:
        return list(self._all[first_index : first_index + len(tokens)]) == list(tokens)

    def withdraw(self, count: int) -> None:
        """The request was ended from outside after `count` tokens: of later ones only those count that were taken."""
        del self._all[max(count, self._num_taken) :]

    def end(self, ending: Ending) -> None:
        """Nothing follows. The first ending counts."""
        if self.ending is None:
            self.ending = ending
            self._on_news(self)

    def end_with(self, record: RequestRecord) -> None:
        """The request's record holds its end, and all of its tokens."""
        assert record.final is not None
        self.num_cached_tokens = record.num_cached_tokens or self.num_cached_tokens
        self.offer(0, record.output)
        if self.ending is None:
            self.record = record
        self.end(Ending.from_final(record.final))

    @property
    def num_taken(self) -> int:
        return self._num_taken

    @property
    def has_waiting(self) -> bool:
        """Whether tokens wait to be taken."""
        return self._num_taken < len(self._all)

    def take(self, most: int) -> "tuple[array[int], Ending | None]":
        """Tokens that wait, and with the last of them the ending if it has been reached."""
        tokens = self._all[self._num_taken : self._num_taken + most]
        self._num_taken += len(tokens)
        return tokens, None if self.has_waiting else self.ending
