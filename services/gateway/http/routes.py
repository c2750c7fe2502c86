"""OpenAI's endpoints."""

import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.body import parse_json, read_body
from services.gateway.http.responses import GenerationResponse, StreamOptions, StreamResponse, WholeResponse
from services.gateway.http.shapes import ChatShape, CompletionShape, Shape
from services.gateway.http.tenants import tenant_of
from services.gateway.requests import bodies
from services.gateway.requests.bodies import ChatBody, CompletionBody
from services.gateway.requests.submissions import build_submissions
from services.gateway.state import GatewayState
from services.gateway.streams.generation import Generation
from services.gateway.tracing import traceparent
from shared.errors import InvalidRequest
from shared.limits import Limits
from shared.messages import Submission

router = APIRouter(prefix="/v1", tags=["OpenAI"])
_seeds = random.SystemRandom()

Body = CompletionBody | ChatBody


def _documented(kind: type[Body]) -> dict[str, Any]:
    """The body's schema for `/openapi.json`; the body itself is read by hand, for size and strictness."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post("/completions", summary="Continue a text", openapi_extra=_documented(CompletionBody))
async def completions(request: Request) -> Response:
    """Text, a list of texts, token ids or a list of such lists; streaming or not."""
    return await _serve(request, CompletionBody, f"cmpl-{uuid.uuid4().hex}")


@router.post("/chat/completions", summary="Answer a conversation", openapi_extra=_documented(ChatBody))
async def chat_completions(request: Request) -> Response:
    """The next message of a conversation; streaming or not."""
    return await _serve(request, ChatBody, f"chatcmpl-{uuid.uuid4().hex}")


@router.get("/models", summary="Models that are served here")
async def models(request: Request) -> Response:
    """Every name under which the model is served."""
    gateway: GatewayState = request.state.gateway
    entries = [_model(gateway, name) for name in gateway.settings.model_names]
    return _json({"object": "list", "data": entries})


@router.get("/models/{name:path}", summary="One model")
async def model(request: Request, name: str) -> Response:
    """The model under this name, or 404."""
    gateway: GatewayState = request.state.gateway
    return _json(_model(gateway, _served_name(gateway, name)))


# ---------------------------------------------------------------- generation


async def _serve(request: Request, kind: type[Body], request_id: str) -> GenerationResponse:
    """Everything up to the point where the request may be queued."""
    started_at, created = time.monotonic(), time.time()
    request.scope["state"]["request_id"] = request_id
    gateway: GatewayState = request.state.gateway
    tenant = tenant_of(request.headers, gateway.settings.tenant_header)
    data = await read_body(request.receive, request.headers, gateway.settings.max_body_bytes)
    limits = gateway.admit()
    span = gateway.tracing.start_request(request.url.path, request_id, request.headers)
    try:
        body, submissions = await gateway.in_text_pool(
            _prepare, gateway, kind, data, limits, request_id, created, tenant, traceparent(span)
        )
    except BaseException:
        span.end()
        raise
    generation = Generation(gateway.engine, submissions, started_at)
    return _response(gateway, body, generation, _shape(body, submissions, request_id), span, request_id)


def _prepare(
    gateway: GatewayState,
    kind: type[Body],
    data: bytes,
    limits: Limits,
    request_id: str,
    created: float,
    tenant: str,
    trace: str,
) -> tuple[Body, list[Submission]]:
    """Bytes to checked submissions: parse, validate, render, tokenize. Runs in the text threads."""
    body = bodies.read_body(kind, parse_json(data))
    return body, build_submissions(
        body,
        gateway.engine.tokenizer,
        limits,
        request_id=request_id,
        created=created,
        model=_served_name(gateway, body.model),
        rng=_seeds,
        tenant=tenant,
        traceparent=trace,
    )


def _shape(body: Body, submissions: Sequence[Submission], request_id: str) -> Shape:
    first = submissions[0]
    kind = ChatShape if isinstance(body, ChatBody) else CompletionShape
    return kind(request_id, first.model, int(first.created))


def _response(
    gateway: GatewayState, body: Body, generation: Generation, shape: Shape, span: Any, request_id: str
) -> GenerationResponse:
    if not body.stream:
        return WholeResponse(generation, shape, span, request_id)
    wanted = body.stream_options
    options = StreamOptions(
        include_usage=bool(wanted and wanted.include_usage),
        continuous_usage=bool(wanted and wanted.continuous_usage_stats),
    )
    ping_interval_s = gateway.settings.ping_interval_s
    return StreamResponse(generation, shape, span, request_id, options=options, ping_interval_s=ping_interval_s)


# ---------------------------------------------------------------- models


def _served_name(gateway: GatewayState, name: str | None) -> str:
    names = gateway.settings.model_names
    if name is None:
        return names[0]
    if name not in names:
        shown = name if len(name) <= 128 else name[:128] + "…"
        raise InvalidRequest(
            f"the model {shown!r} is not served here; served: {', '.join(names)}",
            param="model",
            code="model_not_found",
            status=404,
        )
    return name


def _model(gateway: GatewayState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(gateway.started),
        "owned_by": "pagewire",
        "root": gateway.settings.model_names[0],
        "max_model_len": gateway.max_model_len or None,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
