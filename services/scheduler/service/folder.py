"""Folding: committed output moves into the request records, so that record + log after `log_id` is all of it."""

from collections.abc import Iterable

from services.scheduler.core.outcomes import LiveOutput
from shared.keys import Keys
from shared.records import LIVE_TTL_S, Seat, fold_fields
from shared.scripts import SetFields


class Folder:
    """Folds what changed since the last time, within a tick's commit: a leader that was deposed cannot fold."""

    def __init__(self) -> None:
        self._folded: dict[str, tuple[int, Seat | None]] = {}

    def operations(self, keys: Keys, live: Iterable[LiveOutput], log_id: str) -> list[SetFields]:
        """Bring the records of all live requests up to `log_id`."""
        now: dict[str, tuple[int, Seat | None]] = {}
        operations = []
        for request in live:
            seat = None if request.seat is None else Seat(*request.seat)
            state = now[request.request_id] = (len(request.output), seat)
            if self._folded.get(request.request_id, (0, None)) != state:
                fields = fold_fields(
                    request.output, log_id, seat, request.num_cached_tokens, request.logprobs, request.fingerprint
                )
                operations.append(SetFields(keys.request(request.request_id), fields, LIVE_TTL_S))
        self._folded = now
        return operations
