"""Every error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import logging
import traceback
from math import ceil
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.streams.generation import GenerationFailed
from shared.errors import IdempotencyConflict, InvalidRequest, PagewireError, QueueFull, Unavailable

RETRY_AFTER_S = 2
"""Told with 503: about the time in which a lost leader or worker is replaced."""

logger = logging.getLogger(__name__)

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The shape alone."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """A complete error answer."""
    body = msgspec.json.encode(error_body(message, kind=kind, param=param, code=code))
    return Response(body, status, headers, "application/json")


def to_response(error: Exception, request_id: str) -> Response:
    """The answer to any exception. Unknown ones are told by the request's id only."""
    if isinstance(error, InvalidRequest):
        headers = {"Connection": "close"} if error.status in (408, 413) else None
        return error_response(error.status, error.message, param=error.param, code=error.code, headers=headers)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(max(1, ceil(error.retry_after_s)))}
        return error_response(429, str(error), kind="rate_limit_error", code=error.code, headers=headers)
    if isinstance(error, IdempotencyConflict):
        return error_response(409, str(error), code="idempotency_conflict")
    if isinstance(error, Unavailable):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return error_response(503, str(error), kind="service_unavailable", code=error.reason, headers=headers)
    if isinstance(error, GenerationFailed):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return error_response(error.status, error.message, kind=kind, code=error.code)
    log_failure(error, request_id)
    return error_response(500, internal_message(request_id), kind="server_error", code="internal_error")


def internal_message(request_id: str) -> str:
    """All that a client is told about a fault of ours."""
    return f"internal error in request {request_id}"


def log_failure(error: BaseException, request_id: str) -> None:
    """Log where it happened, without the exception's text: that may hold parts of a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s: %s at\n%s", request_id, type(error).__qualname__, frames)


def code_of(response: Response) -> str:
    """The `code` of an error answer, for metrics."""
    code = msgspec.json.decode(bytes(response.body))["error"]["code"]
    return str(code or response.status_code)


def install(app: FastAPI) -> None:
    """Give every exception of the application its shape."""
    app.add_exception_handler(PagewireError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)


async def _on_error(request: Request, error: Exception) -> Response:
    response = to_response(error, request.scope["state"]["request_id"])
    request.state.gateway.engine.metrics.failed(code_of(response))
    return response


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "http_error")
    return error_response(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {}))


async def _on_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return error_response(400, f"{param}: {first['msg']}", param=param, code="invalid_value")
