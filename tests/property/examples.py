"""How many examples a property is tried on, and was."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from hypothesis import settings

P = ParamSpec("P")
R = TypeVar("R")

NUM_EXAMPLES: Counter[str] = Counter()
"""By property: examples of this session."""


def at_least(num_examples: int) -> int:
    """Examples of one property: more under the `thorough` profile."""
    return max(num_examples, settings().max_examples)


def counted(check: Callable[P, R]) -> Callable[P, R]:
    """Count the examples; goes under `given`."""
    name = f"{check.__module__.rpartition('.')[2]}::{check.__qualname__.partition('.')[0]}"

    @wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        NUM_EXAMPLES[name] += 1
        return check(*args, **kwargs)

    return run
