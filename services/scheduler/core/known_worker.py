"""Workers by name, over all of their incarnations."""

from collections.abc import Container
from dataclasses import dataclass

MOST_ABSENT = 64
"""Workers that are remembered while they are away."""


@dataclass(slots=True)
class KnownWorker:
    """What is remembered of a worker's name beyond its incarnations."""

    fenced: int = 0
    """Its highest incarnation that is fenced."""
    num_blocks: int = 0
    """Its last capacity. A worker that died is expected back; one that drained is not (0)."""


def forget_absent(known: dict[str, KnownWorker], present: Container[str]) -> None:
    """Containers get new names all the time, and the old ones never come again: the last ones to die are kept."""
    absent = [worker for worker in known if worker not in present]
    for worker in absent[:-MOST_ABSENT]:
        del known[worker]
