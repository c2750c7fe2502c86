"""The exception tree.

    PagewireError
    ├── InvalidRequest          a client's fault: 4xx, names the field
    │   ├── RequestTooLarge     can never fit the pool
    │   └── NoSuchResponse      404: no response has this id, or its records are gone
    ├── QueueFull               429
    │   ├── RateLimited         429: of one API key
    │   └── MemoryFull          429: Redis
    ├── IdempotencyConflict     409: same key, other body
    ├── Unavailable             503: no leader, no worker, no Redis
    ├── ConfigError             a bad setting or model: the process cannot start
    └── ProtocolError
        ├── UnsupportedSchema   a message of another major version: leave it for a peer
        ├── MalformedMessage    bytes that are no message: dead letter
        └── Fenced              the holder's number is not current: stop writing at once

Expected outcomes (a block that is not free yet, a duplicate append) are values, not exceptions.
"""


class PagewireError(Exception):
    """Root of every error that this project raises on purpose."""


class InvalidRequest(PagewireError):
    """The request can never be served as it stands. `param` names the field, `code` is machine-readable."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class RequestTooLarge(InvalidRequest):
    """Prompt plus `max_tokens` exceed the context or the largest worker's blocks."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class NoSuchResponse(InvalidRequest):
    """No request has this id, or not for this tenant, or its records have expired."""

    def __init__(self, response_id: str) -> None:
        shown = response_id if len(response_id) <= 128 else response_id[:128] + "…"
        super().__init__(f"there is no request {shown!r}", param="id", code="request_not_found", status=404)


class QueueFull(PagewireError):
    """The queue cap in requests or prompt tokens is reached; retry after `retry_after_s`. `whoever_asks`: there is no
    room for any request, whatever its size."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, whoever_asks: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.whoever_asks = whoever_asks


class RateLimited(QueueFull):
    """One API key has used its requests at a time or its tokens per minute."""

    code = "rate_limit_exceeded"


class MemoryFull(QueueFull):
    """Redis is so full that only running work may write."""

    code = "memory_full"


class IdempotencyConflict(PagewireError):
    """The idempotency key was used with another body."""


class Unavailable(PagewireError):
    """A part that the request needs is absent; `reason` is machine-readable."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(PagewireError):
    """A setting, model folder or environment that the process cannot start with."""


class ProtocolError(PagewireError):
    """The log or a peer broke the protocol."""


class UnsupportedSchema(ProtocolError):
    """The message carries another major schema version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"message of schema version {version}")
        self.version = version


class MalformedMessage(ProtocolError):
    """The bytes are no message of the expected union."""


class Fenced(ProtocolError):
    """This holder was fenced: somebody else owns its number now."""
