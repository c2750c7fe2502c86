"""Case 110: an entry of intake that is gone although its request was accepted. Nobody waits for ever."""

import threading

import httpx
import pytest

from shared.messages import FinishReason
from tests.fakes.gateway_server import RunningGateway
from tests.integration.pool.test_leaving import Stage
from tests.integration.scheduler.conftest import Pool, wait_for

NUM_TOKENS = 8


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_request_that_nothing_comes_of_is_submitted_again_and_counts_once(
    pool: Pool, gateway: RunningGateway, is_lost: bool
) -> None:
    pool.worker()
    first = pool.scheduler().start()
    gateway.wait_ready()
    gateway.state.engine.reader.quiet.quiet_s = 0.05
    wait_for(lambda: first.leader is not None)
    first.crash()
    body = {"prompt": [65, 66, 67], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(gateway.http.post("/v1/completions", json=body)))
    client.start()
    intake = pool.keys.intake
    wait_for(lambda: bool(pool.client.xlen(intake)))
    if is_lost:
        assert pool.client.xtrim(intake, maxlen=0, approximate=False) == 1
    wait_for(lambda: pool.client.xlen(intake) == 2 - is_lost, timeout_s=15)
    stage = Stage(pool, gateway, pool.scheduler().start())
    client.join(15)
    assert answers and answers[0].json()["usage"]["completion_tokens"] == NUM_TOKENS
    wait_for(lambda: stage.core.counters.ignored == 1 - is_lost)
    wait_for(lambda: bool(stage.usages()))  # the answer comes from the step log, before the tick that accounts for it
    assert [usage.reason for usage in stage.usages()] == [FinishReason.LENGTH]
