"""Requests as resources: who is there and what it waits for; taking a stream up again; ending one."""

import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.responses import Answer, StreamResponse
from services.gateway.http.resuming import find_response, open_response, read_wish
from services.gateway.http.tenants import tenant_of_request
from services.gateway.requests.live import cancel, describe, list_live, read_overviews
from services.gateway.state import GatewayState
from shared.errors import Unavailable
from shared.messages import RequestOverview
from shared.redis_client import RedisFailure

router = APIRouter(prefix="/v1/requests", tags=["requests"])


@router.get("", summary="Live requests")
async def live(request: Request) -> Response:
    """At most 1,000, oldest first: state, age, tokens, blocks, and what for they wait; those of the caller's tenant."""
    gateway: GatewayState = request.state.gateway
    intake = gateway.engine.intake
    try:
        found, has_more = await list_live(intake.client, intake.keys, _tenant(request, gateway), time.time())
    except RedisFailure as error:
        raise _unreachable() from error
    return _json({"object": "list", "data": found, "has_more": has_more})


@router.get("/{request_id}", summary="One request")
async def one(request: Request, request_id: str) -> Response:
    """As in the list; an ended one with its finish reasons, for the record's time to live."""
    gateway: GatewayState = request.state.gateway
    overviews = await _overviews(gateway)
    head, records = await find_response(gateway, request_id, _tenant(request, gateway))
    return _json(describe(head, records, overviews, time.time()))


@router.delete("/{request_id}", summary="End a request")
async def delete(request: Request, request_id: str) -> Response:
    """Its streams end with the finish reason `abort`. One that has ended stays as it is: to repeat this is no error."""
    gateway: GatewayState = request.state.gateway
    overviews = await _overviews(gateway)
    head, records = await find_response(gateway, request_id, _tenant(request, gateway))
    intake = gateway.engine.intake
    try:
        await cancel(intake.client, intake.keys, head)
    except RedisFailure as error:
        raise _unreachable() from error
    return _json(describe(head, records, overviews, time.time()))


@router.get("/{request_id}/stream", summary="What follows an event of a response's stream")
async def stream(request: Request, request_id: str) -> Response:
    """`Last-Event-ID` says what the client has; absent or 0: from the start. Also after the end, for the record's
    time to live."""
    gateway: GatewayState = request.state.gateway
    settings, started_at = gateway.settings, time.monotonic()
    wish = read_wish(request.headers, settings.resume_window_s)
    gateway.require_reader()
    tenant, quota = _tenant(request, gateway), request.state.caller.quota
    answer = await open_response(gateway, request_id, tenant, wish, started_at, quota)
    request.scope["state"]["request_id"] = request_id
    span = gateway.tracing.start_request("/v1/requests/{id}/stream", request_id, request.headers)

    async def reopen(response_id: str) -> Answer:
        raise AssertionError("nothing is submitted")

    return StreamResponse(
        answer,
        span,
        request_id,
        reopen,
        ping_interval_s=settings.ping_interval_s,
        stream_interval_s=settings.stream_interval_s,
    )


async def _overviews(gateway: GatewayState) -> dict[str, RequestOverview]:
    intake = gateway.engine.intake
    try:
        return await read_overviews(intake.client, intake.keys)
    except RedisFailure as error:
        raise _unreachable() from error


def _tenant(request: Request, gateway: GatewayState) -> str:
    return tenant_of_request(request, gateway.settings)


def _unreachable() -> Unavailable:
    return Unavailable("the message log is unreachable", reason="redis_unreachable")


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
