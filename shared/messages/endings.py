"""Why rows and requests end."""

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class EndReason(IntEnum):
    """Why a worker ended a row (token-level endings only)."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    ERROR = 4


class FinishReason(StrEnum):
    """Why a request ended, as the terminal event and the final record say it."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"
    TIMEOUT = "timeout"  # a deadline of the request


FINISH_REASONS: Mapping[EndReason, FinishReason] = {
    EndReason.EOS: FinishReason.STOP,
    EndReason.STOP_TOKEN: FinishReason.STOP,
    EndReason.LENGTH: FinishReason.LENGTH,
    EndReason.ERROR: FinishReason.ERROR,
}
"""How a request ends that a worker ended."""


DEADLINE_CAUSES = ("queue_deadline", "first_token_deadline", "deadline")
"""Causes of the aborts that end a request with TIMEOUT; in the order of `Submission.deadlines`."""


WORKERS_DIED = "several workers in a row died while they computed this request"
"""Message of the ERROR that ends a request which seems to be the reason."""


class EventKind(StrEnum):
    PREEMPTED = "preempted"
    FINISHED = "finished"
