"""What the core counts. Counters start at 0 with the core and survive in its snapshot."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """By what happened; see `SchedulerStats`."""

    preemptions: int = 0
    requeues: int = 0
    plans: int = 0
    ignored: int = 0
    left_requests: int = 0
    left_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    forks: int = 0
    forked_blocks: int = 0
    handovers: int = 0
    swap_outs: int = 0
    swap_ins: int = 0
    demotions: int = 0
    promotions: int = 0
    numerics_switches: int = 0

    def count_moves(self, num_demoted: int, num_promoted: int) -> None:
        self.demotions += num_demoted
        self.promotions += num_promoted
