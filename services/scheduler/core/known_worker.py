"""Workers by name, over all of their incarnations."""

from dataclasses import dataclass


@dataclass(slots=True)
class KnownWorker:
    """What is remembered of a worker's name beyond its incarnations."""

    fenced: int = 0
    """Its highest incarnation that is fenced."""
    num_blocks: int = 0
    """Its last capacity. A worker that died is expected back; one that drained is not (0)."""
