"""Requests as resources: the live ones, one of them, ending one; no text anywhere."""

import asyncio
import time
from contextlib import ExitStack
from typing import Any

import pytest

from services.gateway.http import requests
from services.gateway.requests import live
from shared.messages import Abort, PoolOverview, RequestOverview, encode
from shared.packing import pack_int32
from shared.records import Seat, fold_fields
from tests.fakes.byte_model import answer, spell
from tests.fakes.scripted_pool import Script
from tests.fakes.sse_reader import parse_sse
from tests.integration.gateway.conftest import OpenScene, Scene

CANARY = "canary-7f3a"


def test_live_requests_are_listed_without_text(scene: Scene) -> None:
    scene.scripts[CANARY] = Script(spell(CANARY * 3), end=None)
    http, keys = scene.gateway.http, scene.pool.keys
    with ExitStack() as stack:
        body = {"prompt": CANARY, "stream": True, "n": 2, "stop": "canary-stop"}
        ids = [
            stack.enter_context(http.stream("POST", "/v1/completions", json=body)).headers["x-request-id"]
            for _ in range(3)
        ]
        running = RequestOverview(ids[0], "running", 11, 5, 1, 0.5, "worker-0", 3, num_blocks=4)
        sibling = RequestOverview(f"{ids[0]}#1", "running", 11, 7, 0, 0.5, "worker-0", 4, num_blocks=2)
        waiting = RequestOverview(ids[1], "waiting", 11, 0, 0, 0.5, reason="blocks", detail="needs 3 blocks")
        overview = PoolOverview(time.time(), running=(running, sibling), waiting=(waiting,))
        scene.pool.client.set(keys.overview, encode(overview), px=5000)
        listed = http.get("/v1/requests")
        assert listed.status_code == 200
        data = listed.json()["data"]
        assert [entry["id"] for entry in data] == ids and not listed.json()["has_more"]
        assert (data[0]["state"], data[0]["output_tokens"], data[0]["blocks"], data[0]["sequences"]) == (
            "running",
            12,
            6,
            2,
        )
        assert (data[1]["state"], data[1]["waiting_reason"]) == ("waiting", "blocks")
        assert data[2]["state"] == "accepted" and data[2]["prompt_tokens"] == len(CANARY)
        assert all(0 <= entry["age_s"] < 30 for entry in data)
        one = http.get(f"/v1/requests/{ids[0]}")
        assert one.json()["output_tokens"] == 12
        assert CANARY not in listed.text + one.text and "canary" not in one.text
    scene.gateway.wait_for(lambda: http.get("/v1/requests").json()["data"] == [])


def test_whom_the_overview_does_not_name_is_told_from_the_record(scene: Scene) -> None:
    """It names 100 in each state: a running request beyond was `accepted`, without a token."""
    scene.scripts["go"] = Script((), end=None)
    http, client, keys = scene.gateway.http, scene.pool.client, scene.pool.keys
    body = {"prompt": "go", "stream": True}
    with ExitStack() as stack:
        running, queued = (
            stack.enter_context(http.stream("POST", "/v1/completions", json=body)).headers["x-request-id"]
            for _ in range(2)
        )
        fields: Any = fold_fields(pack_int32([1] * 5), "1-0", Seat("worker-0", 1, 2))
        client.hset(keys.request(running), mapping=fields)
        assert http.get(f"/v1/requests/{queued}").json()["state"] == "accepted"
        others = tuple(RequestOverview(f"other-{i}", "waiting", 1, 0, 0, 0.5, reason="rows") for i in range(100))
        client.set(keys.overview, encode(PoolOverview(time.time(), waiting=others)), px=5000)
        listed = http.get("/v1/requests").json()["data"]
        told = [(one["id"], one["state"], one["output_tokens"], one["blocks"], one["waiting_reason"]) for one in listed]
        assert told == [(running, "running", 5, None, None), (queued, "waiting", 0, 0, "behind")]
        assert http.get(f"/v1/requests/{running}").json()["output_tokens"] == 5


def test_a_waiting_request_outlives_the_time_that_ended_ones_are_kept(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's setting was the gateway's too: who waited for longer lost its record, and ended in an error."""
    monkeypatch.setenv("PAGEWIRE_RECORD_TTL_S", "60")
    scene = open_scene()
    scene.scripts["go"] = Script((), end=None)
    with scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        assert scene.pool.client.ttl(scene.pool.keys.request(request_id)) > 3600


def test_what_ended_after_its_gateway_died_is_not_listed(scene: Scene) -> None:
    """Nobody took it out of the windows: it is still a member, as long as the gateway promised."""
    http, client, keys = scene.gateway.http, scene.pool.client, scene.pool.keys
    request_id = http.post("/v1/completions", json={"prompt": "go"}).json()["id"]
    scene.gateway.wait_for(lambda: http.get(f"/v1/requests/{request_id}").json()["state"] == "finished")
    scene.gateway.wait_for(lambda: client.zcard(keys.windows) == 0)
    client.zadd(keys.windows, {request_id: (time.time() + 60) * 1000})
    assert http.get("/v1/requests").json()["data"] == []


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_what_ends_while_it_is_asked_for_is_told_as_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The record was read before the overview: a request that ended between the two was `accepted`, with no tokens."""
    scene.scripts["go"] = answer("text", hold_after=1)
    http, client, keys = scene.gateway.http, scene.pool.client, scene.pool.keys
    read = live.read_overviews

    async def read_after_the_end(*arguments: Any) -> dict[str, RequestOverview]:
        scene.pool.release()
        await asyncio.to_thread(scene.pool.wait_for, lambda: client.hexists(keys.request(request_id), "final"))
        return await read(*arguments)

    with http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        assert http.get(f"/v1/requests/{request_id}").json()["state"] == "accepted"
        monkeypatch.setattr(requests, "read_overviews", read_after_the_end)
        told = http.request(method, f"/v1/requests/{request_id}").json()
    assert (told["state"], told["output_tokens"]) == ("finished", 5)


def test_deleting_ends_the_stream_and_may_be_repeated(scene: Scene) -> None:
    scene.scripts["go"] = Script(spell("some text"), end=None)
    http = scene.gateway.http
    with http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        scene.pool.wait_for(lambda: scene.pool.submissions)
        scene.gateway.wait_for(lambda: [c.committed for c in scene.gateway.state.engine.reader.channels] == [9])
        assert http.delete(f"/v1/requests/{request_id}").status_code == 200
        stream = parse_sse(response.iter_lines())
    assert stream.is_done and stream.text() == "some text" and stream.finish_reasons() == ["abort"]
    again = http.delete(f"/v1/requests/{request_id}")
    assert again.status_code == 200 and again.json()["state"] == "finished"
    assert again.json()["finish_reasons"] == ["abort"] and again.json()["output_tokens"] == 9
    assert scene.pool.messages(Abort) == [Abort(request_id, "cancelled")]


def test_deleting_what_has_ended_changes_nothing(scene: Scene) -> None:
    request_id = scene.post("/v1/completions", prompt="go", n=2).json()["id"]
    # The answer needs the last token only; the records are final a moment later.
    url = f"/v1/requests/{request_id}"
    scene.gateway.wait_for(lambda: scene.gateway.http.get(url).json()["state"] == "finished")
    for _ in range(2):
        ended = scene.gateway.http.delete(f"/v1/requests/{request_id}").json()
        assert ended["state"] == "finished" and ended["finish_reasons"] == ["stop", "stop"]
    assert scene.pool.messages(Abort) == []
    for method in ("GET", "DELETE"):
        assert scene.gateway.http.request(method, "/v1/requests/cmpl-none").status_code == 404


def test_tenants_see_their_own(open_scene: OpenScene) -> None:
    scene = open_scene(tenant_header="X-Tenant")
    scene.scripts["go"] = answer("text", hold_after=1)
    http = scene.gateway.http
    mine, theirs = {"X-Tenant": "a"}, {"X-Tenant": "b"}
    with http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}, headers=mine) as response:
        request_id = response.headers["x-request-id"]
        assert [e["id"] for e in http.get("/v1/requests", headers=mine).json()["data"]] == [request_id]
        assert http.get("/v1/requests", headers=theirs).json()["data"] == []
        for method in ("GET", "DELETE"):
            assert http.request(method, f"/v1/requests/{request_id}", headers=theirs).status_code == 404
        scene.pool.release()
        assert parse_sse(response.iter_lines()).is_done


def test_the_requests_of_others_do_not_hide_ones_own(open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is cut after it was narrowed down to one tenant, not before."""
    monkeypatch.setattr(live, "MOST", 2)
    scene = open_scene(tenant_header="X-Tenant")
    scene.scripts["go"] = answer("text", hold_after=1)
    http = scene.gateway.http
    with ExitStack() as stack:
        ids = {
            tenant: stack.enter_context(
                http.stream(
                    "POST", "/v1/completions", json={"prompt": "go", "stream": True}, headers={"X-Tenant": tenant[0]}
                )
            ).headers["x-request-id"]
            for tenant in ("a1", "a2", "a3", "a4", "b1")
        }
        listed = http.get("/v1/requests", headers={"X-Tenant": "b"}).json()
        assert [entry["id"] for entry in listed["data"]] == [ids["b1"]] and not listed["has_more"]
        listed = http.get("/v1/requests", headers={"X-Tenant": "a"}).json()
        assert len(listed["data"]) == 2 and listed["has_more"]
        scene.pool.release()
