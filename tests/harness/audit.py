"""What has to be true after faults: every text, every usage record, the idle state."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.records import read_record
from tests.harness.pool_state import PoolState
from tests.harness.streams import Outcome


@dataclass(slots=True)
class Audit:
    """Counts of what was compared, and everything that is wrong."""

    num_streams: int = 0
    num_tokens: int = 0
    num_resumed: int = 0
    num_refused: int = 0
    """Streams that were refused at once, as while nobody has led for long."""
    num_excused: int = 0
    """Streams that ended in the one error that this fault may cause."""
    faults: list[str] = field(default_factory=list)

    def check_streams(
        self, outcomes: Sequence[Outcome], is_excused: Callable[[Outcome], bool] = lambda _: False
    ) -> None:
        """Each client has got exactly the text of its reference, once, or an error that is excused."""
        for outcome in outcomes:
            if outcome.was_refused:
                self.num_refused += 1
                continue
            self.num_streams += 1
            self.num_tokens += len(outcome.reference.tokens)
            self.num_resumed += outcome.num_resumed
            if is_excused(outcome):
                self.num_excused += 1
            elif fault := outcome.fault():
                self.faults.append(f"stream {outcome.request_id or '?'}: {fault}")

    def check_records(self, pool: PoolState, outcomes: Sequence[Outcome]) -> None:
        """The committed tokens of each, by id, are those of its reference."""
        for outcome in _accepted(outcomes):
            record = read_record(pool.client, pool.keys, outcome.request_id)
            if record is None or record.final is None:
                self.faults.append(f"record {outcome.request_id}: {'absent' if record is None else 'without an end'}")
            elif tuple(record.output) != outcome.reference.tokens:
                self.faults.append(f"record {outcome.request_id}: other tokens than those of its reference")

    def check_usage(self, pool: PoolState, outcomes: Sequence[Outcome], before: int = 0) -> None:
        """One usage record for each stream, of what it got; none of anything else. `before`: records of earlier."""
        usage = pool.usage()[before:]
        times = Counter(record.request_id for record in usage)
        self.faults += [f"usage of {name}: {count} records" for name, count in times.items() if count != 1]
        wanted = {outcome.request_id: len(outcome.reference.tokens) for outcome in _accepted(outcomes)}
        self.faults += [f"usage of {name}: none" for name in wanted if name not in times]
        self.faults += [f"usage of {name}: of no stream" for name in times if name not in wanted]
        for record in usage:
            if record.num_output_tokens != wanted.get(record.request_id, record.num_output_tokens):
                self.faults.append(f"usage of {record.request_id}: {record.num_output_tokens} output tokens")

    def check_idle(self, pool: PoolState, seconds: float = 60.0) -> None:
        """Nothing lives, nothing is held."""
        try:
            pool.wait_idle(seconds)
        except TimeoutError as error:
            self.faults.append(str(error))


def _accepted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.was_refused]
