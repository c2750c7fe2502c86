"""How long to wait before a dead child is started again."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """The first restart is immediate (streams wait for it); each further death in quick succession doubles the wait."""

    base_s: float = 0.5
    cap_s: float = 5.0
    healthy_after_s: float = 10.0
    """A child that ran this long had recovered: the count starts anew."""
    failures: int = 0

    def next_delay(self, ran_for_s: float) -> float:
        """Seconds until the next start of a child that has just died after `ran_for_s` seconds."""
        if ran_for_s >= self.healthy_after_s:
            self.failures = 0
        self.failures += 1
        if self.failures == 1:
            return 0.0
        return min(self.cap_s, self.base_s * 2.0 ** min(self.failures - 2, 30))
