"""OpenAI's endpoints."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.body import parse_json, read_body
from services.gateway.http.context import DRAWN
from services.gateway.http.event_ids import Received
from services.gateway.http.responses import Answer, GenerationResponse, StreamOptions, StreamResponse, WholeResponse
from services.gateway.http.resuming import Wish, body_digest, check_is_known, open_response, read_wish
from services.gateway.http.shapes import shape_of
from services.gateway.http.tenants import tenant_of_request
from services.gateway.requests import bodies
from services.gateway.requests.bodies import ChatBody, CompletionBody
from services.gateway.requests.submissions import build_submissions
from services.gateway.state import GatewayState
from services.gateway.streams.custody import Attachment
from services.gateway.streams.generation import Generation
from services.gateway.streams.intake import Claim
from services.gateway.tracing import traceparent
from shared.errors import IdempotencyConflict, InvalidRequest, NoSuchResponse
from shared.limits import Limits
from shared.messages import ResponseHead, Submission
from shared.scripts.quotas import Quota

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
    return await _serve(request, CompletionBody, "cmpl-")


@router.post("/chat/completions", summary="Answer a conversation", openapi_extra=_documented(ChatBody))
async def chat_completions(request: Request) -> Response:
    """The next message of a conversation; streaming or not."""
    return await _serve(request, ChatBody, "chatcmpl-")


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


async def _serve(request: Request, kind: type[Body], prefix: str) -> GenerationResponse:
    """Everything up to the point where the request may be queued."""
    started_at, created = time.monotonic(), time.time()
    state = request.scope["state"]
    request_id = state["request_id"] = prefix + state["request_id"].removeprefix(DRAWN)
    gateway: GatewayState = request.state.gateway
    tenant = tenant_of_request(request, gateway.settings)
    wish = read_wish(request.headers, gateway.settings.resume_window_s)
    intake = gateway.engine.intake
    with gateway.body_room.place() as take:
        data = await read_body(request.receive, request.headers, gateway.settings.max_body_bytes, take)
        async with gateway.text_place(data):
            if not wish.key_digest:
                intake.take_turn()  # others may have learned meanwhile that the queue is full
            limits = gateway.admit()
            span = gateway.tracing.start_request(request.url.path, request_id, request.headers)
            try:
                body, submissions, digest = await gateway.work_on_text(
                    data, _prepare, gateway, kind, limits, request_id, created, tenant, traceparent(span)
                )
            except BaseException:
                span.end()
                raise
    claim = Claim(wish.key_digest, digest) if wish.key_digest else None
    answer = _answer(gateway, body, submissions, wish, claim, request.state.caller.quota, started_at)
    if body.stream:
        try:
            await check_is_known(gateway, tenant, wish, answer.generation.most_tokens)
        except BaseException:
            span.end()
            raise

    async def reopen(response_id: str) -> Answer:
        # A body that does not stream is told as a whole, whatever the client has.
        rest = wish if body.stream else replace(wish, last_event_id=None)
        try:
            return await open_response(gateway, response_id, tenant, rest, started_at, request.state.caller.quota)
        except NoSuchResponse:
            raise IdempotencyConflict("the answer under this idempotency key has expired; use another key") from None

    settings = gateway.settings
    if not body.stream:
        return WholeResponse(answer, span, request_id, reopen)
    return StreamResponse(
        answer,
        span,
        request_id,
        reopen,
        ping_interval_s=settings.ping_interval_s,
        stream_interval_s=settings.stream_interval_s,
    )


def _prepare(
    data: bytes,
    gateway: GatewayState,
    kind: type[Body],
    limits: Limits,
    request_id: str,
    created: float,
    tenant: str,
    trace: str,
) -> tuple[Body, list[Submission], str]:
    """Bytes to checked submissions: parse, validate, render, tokenize. May run in a text thread."""
    parsed = parse_json(data)
    body = bodies.read_body(kind, parsed)
    submissions = build_submissions(
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
    return body, submissions, body_digest(kind.__name__, parsed)


def _answer(
    gateway: GatewayState,
    body: Body,
    submissions: Sequence[Submission],
    wish: Wish,
    claim: Claim | None,
    quota: Quota | None,
    started_at: float,
) -> Answer:
    """A new request's."""
    wanted, is_resumable = body.stream_options, wish.is_resumable or bool(body.background)
    options = StreamOptions(
        include_usage=bool(wanted and wanted.include_usage),
        continuous_usage=bool(wanted and wanted.continuous_usage_stats),
    )
    first = submissions[0]
    head = ResponseHead(
        request_ids=tuple(s.request_id for s in submissions),
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        created=first.created,
        tenant=first.tenant,
        num_prompt_tokens=sum(len(s.prompt_tokens) // 4 for s in submissions if s.group in ("", s.request_id)),
        window_s=wish.window_s if is_resumable else 0.0,
    )
    attachment = Attachment(first.request_id, wish.window_s, is_resumable=is_resumable)
    generation = Generation(gateway.engine, submissions, head, attachment, started_at, claim, quota)
    return Answer(generation, shape_of(first), options, Received.nothing(generation.num_choices))


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
