"""Traces from files of JSON lines, one request per line:

    {"arrival": 0.5, "prompt_tokens": 700, "output_tokens": 120}
    {"arrival": 0.9, "prompt_tokens": 700, "output_tokens": 80, "prefix_ids": [1, 2], "tenant": "a", "priority": -1}

`arrival`        seconds from any start, or `timestamp` in milliseconds
`prompt_tokens`  tokens of the prompt (or `input_length`), `output_tokens` of the answer (or `output_length`)
`prefix_ids`     names of the first tokens, `prefix_id_tokens` (512) at a time (or `hash_ids`): equal names from the
                 start on are an equal prefix. The last may stand for fewer; what comes behind is the request's own
`after`          id of an earlier request; `arrival` is then the delay after its end
`id`, `tenant`, `priority`, `cache_salt`, `max_tokens`, `n`, `abort_at` may be absent

`timestamp`, `input_length`, `output_length` and `hash_ids` are the names of the traces that Mooncake published.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from services.scheduler.simulator.trace import Piece, Trace, TraceRequest, check_trace
from shared.errors import ConfigError

PREFIX_ID_TOKENS = 512


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    arrival: float | None = None
    timestamp: float | None = None
    prompt_tokens: int | None = None
    input_length: int | None = None
    output_tokens: int | None = None
    output_length: int | None = None
    prefix_ids: list[int | str] = []
    hash_ids: list[int | str] = []
    prefix_id_tokens: int = PREFIX_ID_TOKENS
    id: str = ""
    after: str = ""
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    max_tokens: int = 0
    n: int = 1
    abort_at: float = 0.0


_decoder = msgspec.json.Decoder(_Line)


def read_lines(path: Path) -> Trace:
    """The requests of a file of JSON lines, by arrival.

    Raises:
        ConfigError: the file cannot be read, or a line is no request; names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_request(_decoder.decode(line), f"r{len(requests)}"))
            except (msgspec.DecodeError, ValueError) as error:
                raise ConfigError(f"trace {path}, line {number}: {error}") from error
    if not requests:
        raise ConfigError(f"trace {path} holds no request")
    check_trace(requests)
    return from_start(requests)


def from_start(requests: Iterable[TraceRequest]) -> Trace:
    """The same, with the first arrival at 0. Delays after other requests stay."""
    requests = list(requests)
    start = min((request.arrival for request in requests if not request.after), default=0.0)
    return [request if request.after else replace(request, arrival=request.arrival - start) for request in requests]


def _request(line: _Line, default_id: str) -> TraceRequest:
    request_id = line.id or default_id
    num_prompt = _required("prompt_tokens", line.prompt_tokens, line.input_length)
    num_output = _required("output_tokens", line.output_tokens, line.output_length)
    if line.arrival is None and line.timestamp is None:
        raise ValueError("arrival is missing")
    arrival = line.arrival if line.arrival is not None else (line.timestamp or 0.0) / 1000
    return TraceRequest(
        request_id=request_id,
        arrival=arrival,
        prompt=_pieces(request_id, num_prompt, line.prefix_ids or line.hash_ids, line.prefix_id_tokens),
        output=(Piece(f"out:{request_id}", num_output),),
        max_tokens=line.max_tokens,
        after=line.after,
        tenant=line.tenant,
        priority=line.priority,
        cache_salt=line.cache_salt,
        num_choices=line.n,
        abort_at=line.abort_at,
    )


def _required(name: str, *given: int | None) -> int:
    value = next((number for number in given if number is not None), None)
    if value is None or value < 1:
        raise ValueError(f"{name} is missing" if value is None else f"{name} must be at least 1, not {value}")
    return value


def _pieces(request_id: str, num_tokens: int, prefix_ids: list[int | str], size: int) -> tuple[Piece, ...]:
    if size < 1:
        raise ValueError(f"prefix_id_tokens must be at least 1, not {size}")
    pieces, left = [], num_tokens
    for name in prefix_ids:
        pieces.append(Piece(f"id:{name}", min(size, left)))
        left -= pieces[-1].length
    if left:
        pieces.append(Piece(f"in:{request_id}", left))
    return tuple(piece for piece in pieces if piece.length)
