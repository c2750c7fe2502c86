"""Intake: gateways and supervisors → scheduler."""

from shared.messages.codec import Message, tag


class Submit(Message, frozen=True, tag=tag("submit")):
    """The record of `request_id` is complete: schedule it."""

    request_id: str


class Stop(Message, frozen=True, tag=tag("stop")):
    """A stop string completed: only `num_output_tokens` tokens count; the rest is not needed."""

    request_id: str
    num_output_tokens: int


class Abort(Message, frozen=True, tag=tag("abort")):
    """Nobody waits for the request any more. `attach` is the attach number under which the sender held it."""

    request_id: str
    cause: str
    """`client_disconnect`, `cancelled`, `deadline`, …: a metric label."""
    attach: int = 0


class ProcessDied(Message, frozen=True, tag=tag("died")):
    """A supervisor saw its child end: no need to wait for the lease of `instance` to lapse."""

    instance: str


IntakeMessage = Submit | Stop | Abort | ProcessDied
