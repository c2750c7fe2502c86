"""Committed tokens of one request on their way from the log reader to its response."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.messages import FINISH_REASONS, EndReason, Final, FinishReason, RequestEvent
from shared.records import RequestRecord


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
        codes = {FinishReason.ERROR: "generation_failed", FinishReason.REJECTED: "rejected"}
        return cls(known, EndReason(end_reason) if end_reason else None, message, codes.get(known, ""))


class TokenChannel:
    """Holds what the response has not taken yet; never more than the request's `max_tokens`.

    Tokens that accumulate while the response is busy are taken together. Offers are idempotent: a token counts only at
    the index that equals the number of tokens offered so far.
    """

    __slots__ = (
        "_on_news",
        "_tokens",
        "capacity",
        "committed",
        "ending",
        "last_news",
        "num_cached_tokens",
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
        self.committed = 0
        self.ending: Ending | None = None
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache held; known before the first token comes."""
        self.start_id = ""
        """Log position when the reader began to track the request: all of its tokens come later."""
        self.last_news = 0.0
        self._tokens = array("i")
        self._on_news = on_news

    def offer(self, first_index: int, tokens: Sequence[int]) -> None:
        """Tokens whose first one has output index `first_index`; what is known already is skipped."""
        fresh = tokens[self.committed - first_index :] if first_index <= self.committed else ()
        room = self.capacity - self.committed
        if self.ending is not None or not fresh or room <= 0:
            return
        fresh = fresh[:room]
        self._tokens.extend(fresh)
        self.committed += len(fresh)
        self._on_news(self)

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

    def take(self) -> "tuple[array[int], Ending | None]":
        """All tokens that wait, and the ending if it has been reached."""
        tokens, self._tokens = self._tokens, array("i")
        return tokens, self.ending
