"""Synthetic traces. Equal arguments give equal traces: all chance comes from `seed`.

poisson        independent requests at random times
chat           conversations of several turns behind one of a few system prompts; a turn comes when the last is answered
long_document  several questions to each of a few long documents
bursty         many requests at once, then silence
bimodal        mostly short prompts, some very long ones

Lengths are log-normal around their mean, as prompts and answers of people are.
"""

import inspect
import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from services.scheduler.simulator.trace import Piece, Trace, TraceRequest, num_tokens
from shared.errors import ConfigError

SPREAD = 0.6
"""Standard deviation of a length's logarithm."""
ALLOWANCE = 4
"""Clients allow this many times the mean output; what would be longer is cut there, by length."""


def _length(rng: random.Random, mean: int) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)))


def _arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


class _Maker:
    """Makes the requests of one trace."""

    def __init__(self, seed: int, output: int, tenants: int) -> None:
        self.rng = random.Random(seed)
        self.made: list[TraceRequest] = []
        self._output, self._tenants = output, tenants

    def add(self, arrival: float, prompt: tuple[Piece, ...], *, after: str = "", tenant: str = "") -> TraceRequest:
        request_id = f"r{len(self.made)}"
        limit = ALLOWANCE * self._output
        length = min(_length(self.rng, self._output), limit)
        request = TraceRequest(
            request_id=request_id,
            arrival=arrival,
            prompt=prompt,
            output=(Piece(f"out:{request_id}", length),),
            max_tokens=limit,
            after=after,
            tenant=tenant or self.tenant(len(self.made)),
        )
        self.made.append(request)
        return request

    def tenant(self, number: int) -> str:
        return f"tenant-{number % self._tenants}" if self._tenants > 1 else ""

    def fresh(self, mean: int) -> tuple[Piece, ...]:
        """A text that nobody else has."""
        return (Piece(f"in:{len(self.made)}", _length(self.rng, mean)),)


def poisson(
    *, requests: int = 1000, rate: float = 4.0, prompt: int = 300, output: int = 150, tenants: int = 1, seed: int = 0
) -> Trace:
    """Independent requests, `rate` per second."""
    maker = _Maker(seed, output, tenants)
    for _, arrival in zip(range(requests), _arrivals(maker.rng, rate), strict=False):
        maker.add(arrival, maker.fresh(prompt))
    return maker.made


def chat(
    *,
    requests: int = 1000,
    rate: float = 1.0,
    turns: int = 5,
    systems: int = 4,
    system: int = 400,
    prompt: int = 60,
    output: int = 150,
    think: float = 5.0,
    tenants: int = 1,
    seed: int = 0,
) -> Trace:
    """`rate` conversations begin per second, with one of `systems` system prompts; people think `think` seconds."""
    maker = _Maker(seed, output, tenants)
    for number, arrival in zip(count(), _arrivals(maker.rng, rate), strict=False):
        text: tuple[Piece, ...] = (Piece(f"system:{maker.rng.randrange(systems)}", system),)
        last, delay = "", arrival
        for _ in range(turns):
            if len(maker.made) == requests:
                return maker.made
            said = maker.add(delay, text + maker.fresh(prompt), after=last, tenant=maker.tenant(number))
            assert isinstance(said.prompt, tuple) and isinstance(said.output, tuple)
            text, last = said.prompt + said.output, said.request_id
            delay = maker.rng.expovariate(1 / think)
    raise AssertionError("unreachable")


def long_document(
    *,
    requests: int = 200,
    rate: float = 0.5,
    documents: int = 8,
    document: int = 6000,
    prompt: int = 40,
    output: int = 200,
    tenants: int = 1,
    seed: int = 0,
) -> Trace:
    """Questions to one of `documents` documents, which the tenants have in common or not, as the tenants do."""
    maker = _Maker(seed, output, tenants)
    lengths = [_length(maker.rng, document) for _ in range(documents)]
    for _, arrival in zip(range(requests), _arrivals(maker.rng, rate), strict=False):
        which = maker.rng.randrange(documents)
        maker.add(arrival, (Piece(f"document:{which}", lengths[which]), *maker.fresh(prompt)))
    return maker.made


def bursty(
    *,
    requests: int = 1000,
    burst: int = 50,
    pause: float = 20.0,
    prompt: int = 300,
    output: int = 150,
    tenants: int = 1,
    seed: int = 0,
) -> Trace:
    """Bursts of about `burst` requests within a second, a burst every `pause` seconds on average."""
    maker = _Maker(seed, output, tenants)
    for begun in _arrivals(maker.rng, 1 / pause):
        size = min(_length(maker.rng, burst), requests - len(maker.made))
        for arrival in sorted(begun + maker.rng.random() for _ in range(size)):
            maker.add(arrival, maker.fresh(prompt))
        if len(maker.made) == requests:
            break
    return maker.made


def bimodal(
    *,
    requests: int = 1000,
    rate: float = 3.0,
    share: float = 0.1,
    prompt: int = 100,
    long: int = 3000,
    output: int = 150,
    tenants: int = 1,
    seed: int = 0,
) -> Trace:
    """Prompts around `prompt` tokens, and a `share` of them around `long`."""
    maker = _Maker(seed, output, tenants)
    for _, arrival in zip(range(requests), _arrivals(maker.rng, rate), strict=False):
        maker.add(arrival, maker.fresh(long if maker.rng.random() < share else prompt))
    return maker.made


GENERATORS: dict[str, Callable[..., Trace]] = {
    "poisson": poisson,
    "chat": chat,
    "long_document": long_document,
    "bursty": bursty,
    "bimodal": bimodal,
}


def generate(spec: str, **given: Any) -> Trace:
    """A trace by words: `chat`, or `chat:turns=8,think=2.5`. `given` are further arguments; None is not given.

    Raises:
        ConfigError: no such generator or argument, or a value of another kind.
    """
    name, _, rest = spec.partition(":")
    generator = GENERATORS.get(name.replace("-", "_"))
    if generator is None:
        raise ConfigError(f"trace {name!r}: neither a file nor one of {', '.join(GENERATORS)}")
    known = {name: parameter.default for name, parameter in inspect.signature(generator).parameters.items()}
    arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        if key not in known:
            raise ConfigError(f"trace {name!r} has no {key!r}; it has {', '.join(known)}")
        arguments[key] = _number(f"{name}:{key}", value, type(known[key]))
    trace = generator(**{key: value for key, value in arguments.items() if key in known})
    if not trace or min(num_tokens(request.prompt) for request in trace) < 1:
        raise ConfigError(f"trace {spec!r} has no request")
    return trace


def _number(name: str, text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 <= value < math.inf or (value == 0 and not name.endswith("seed")):
        raise ConfigError(f"trace option {name}: {text!r} is not a positive {kind.__name__}")
    return value
