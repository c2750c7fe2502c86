"""`pagewire up --policy`: who goes next on the real stack, with a single row so that there is always one who does.

Of each load it is asserted what it shows under the policy, and that it does not show it first come, first served.
"""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import httpx
import pytest

from tests.harness.fixtures import StartStack
from tests.harness.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.slow]

TENANT_HEADER = "x-tenant"
LATER_S = 0.2
"""The first wishes of a load keep the row busy for longer."""


class Wish(NamedTuple):
    """One request of a load; all have prompts of one length, with no full block to share."""

    at: float = 0.0
    """When it is sent, in seconds."""
    priority: int = 0
    tenant: str = ""
    num_tokens: int = 8


@pytest.fixture(scope="module")
def policy_stack(
    request: pytest.FixtureRequest, start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack with this policy. What it decided is recorded, and must replay to the same bytes when it has ended."""
    recording = tmp_path_factory.mktemp("recording")
    options = {"max_num_seqs": 1, "tenant_header": TENANT_HEADER, "record": recording}
    with start_stack(policy=request.param, **options) as stack:
        yield stack
    command = [sys.executable, "-m", "services.cli", "replay", str(recording)]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert replayed.returncode == 0 and replayed.stdout.strip().endswith("byte-identical"), replayed.stdout


def order_of_entry(stack: Stack, wishes: Sequence[Wish]) -> list[int]:
    """The places of the wishes, in the order in which plans gave them the row for the first time."""
    with stack.watch_log() as watch:
        places = {request_id: place for place, request_id in enumerate(asyncio.run(_send(stack, wishes)))}
        stack.wait_idle()
    entered = [places[request_id] for request_id in dict.fromkeys(new.request_id for new in watch.added_rows())]
    assert sorted(entered) == list(range(len(wishes)))
    return entered


async def _send(stack: Stack, wishes: Sequence[Wish]) -> list[str]:
    async def one(client: httpx.AsyncClient, place: int, wish: Wish) -> str:
        await asyncio.sleep(wish.at)
        sizes = {"max_tokens": wish.num_tokens, "min_tokens": wish.num_tokens, "temperature": 0}
        body = {"model": stack.model, "prompt": [1000 + place] * 12, "priority": wish.priority, **sizes}
        answer = await client.post("/v1/completions", json=body, headers={TENANT_HEADER: wish.tenant})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        return await asyncio.gather(*(one(client, place, wish) for place, wish in enumerate(wishes)))


@pytest.mark.parametrize(
    ("policy_stack", "is_sorted"), [("fcfs", False), ("priority", True)], indirect=["policy_stack"]
)
def test_smaller_priorities_go_first_only_under_priority(policy_stack: Stack, is_sorted: bool) -> None:
    """BEST-26: while one runs, three of priority 10 come, then one of 5, last one of 0."""
    later = [Wish(LATER_S + 0.02 * place, priority) for place, priority in enumerate((10, 10, 10, 5, 0))]
    wishes = [Wish(num_tokens=100), *later]
    first, *others = order_of_entry(policy_stack, wishes)
    priorities = [wishes[place].priority for place in others]
    assert first == 0 and (priorities == sorted(priorities)) == is_sorted, priorities


@pytest.mark.parametrize(("policy_stack", "is_fair"), [("fcfs", False), ("fair", True)], indirect=["policy_stack"])
def test_tenants_share_by_tokens_only_under_fair(policy_stack: Stack, is_fair: bool) -> None:
    """BEST-27: `b` comes behind a queue of `a`. All requests are of one size, so tokens served are requests served;
    Jain's index is taken from b's first to its last."""
    wishes = [*[Wish(tenant="a")] * 24, *[Wish(LATER_S, tenant="b")] * 8]
    tenants = [wishes[place].tenant for place in order_of_entry(policy_stack, wishes)]
    first, last = tenants.index("b"), len(tenants) - 1 - tenants[::-1].index("b")
    served = Counter(tenants[first : last + 1])
    jain = served.total() ** 2 / (2 * (served["a"] ** 2 + served["b"] ** 2))
    assert (jain >= 0.95 and last < len(tenants) - 4) if is_fair else jain < 0.8, tenants
