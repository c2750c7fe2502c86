"""The clients' side of a simulation: when each request came, began, spoke and ended."""

from dataclasses import dataclass

from services.scheduler.simulator.measures import Samples
from services.scheduler.simulator.report import ClientReport
from services.scheduler.simulator.worker import Admission


@dataclass(slots=True)
class Client:
    """One request."""

    arrival: float
    num_prompt_tokens: int
    admitted: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    """Up to date whenever its row is not in a batch."""
    ended: float = -1.0


class Clients:
    """All of them. A step's gaps between tokens are noted once for all rows that go on, not per row."""

    def __init__(self) -> None:
        self.ttft, self.itl, self.queue_time, self.latency = Samples(), Samples(), Samples(), Samples()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_recomputed_tokens = 0
        self.first_arrival = float("inf")
        self.last_token = 0.0
        self._clients: dict[str, Client] = {}

    def on_arrival(self, request_id: str, num_prompt_tokens: int, now: float) -> None:
        self._clients[request_id] = Client(now, num_prompt_tokens)
        self.first_arrival = min(self.first_arrival, now)

    def on_admission(self, admission: Admission, now: float) -> None:
        client = self._clients[admission.request_id]
        if client.admitted < 0:
            client.admitted = now
            self.queue_time.add(now - client.arrival)
            self.num_prompt_tokens += client.num_prompt_tokens
        else:
            self.num_recomputed_tokens += max(0, admission.num_known - admission.num_computed - 1)

    def on_step(self, joined: list[str], ended: list[str], num_continuing: int, now: float, before: float) -> None:
        """A step's tokens are there `now`, those of the worker's step before it were at `before`."""
        if num_continuing:
            self.itl.add(now - before, num_continuing)
        for request_id in joined:
            client = self._clients[request_id]
            if client.first_token < 0:
                client.first_token = now
                self.ttft.add(now - client.arrival)
            else:
                self.itl.add(now - client.last_token)
        self.num_output_tokens += num_continuing + len(joined)
        if num_continuing or joined:
            self.last_token = now
        for request_id in ended:
            client = self._clients[request_id]
            client.ended = now
            self.latency.add(now - client.arrival)

    def on_left(self, request_ids: list[str], now: float) -> None:
        """Their rows left a batch; their last tokens were there at `now`."""
        for request_id in request_ids:
            self._clients[request_id].last_token = now

    def reports(self) -> tuple[ClientReport, ...]:
        """Of those whose requests came to their end, in order of arrival."""
        return tuple(
            ClientReport(request_id, client.arrival, client.first_token - client.arrival, client.ended - client.arrival)
            for request_id, client in self._clients.items()
            if client.ended >= 0
        )
