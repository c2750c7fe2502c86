"""Health and metrics: from what the monitor saw last, never by way of the request path."""

from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.health import PoolView, Readiness, first_unready
from services.gateway.http.errors import RETRY_AFTER_S
from services.gateway.state import GatewayState
from shared.messages import Lease

router = APIRouter(tags=["operations"])


@router.get("/health/live", summary="Whether this process answers")
async def live() -> Response:
    """200 while the event loop turns."""
    return _json({"status": "live"})


@router.get("/health/ready", summary="Whether requests can be served")
async def ready(request: Request) -> Response:
    """200, or 503 with a machine-readable `reason`; with the state of each component. `saturated`: what is new is
    refused with 429 for now, because of `saturated_by`; what runs goes on. `stalled`: there is work and has been no
    progress for so many seconds, and why."""
    return _answer(_gateway(request), {})


@router.get("/health", summary="Readiness with details of the pool")
async def health(request: Request) -> Response:
    """As `/health/ready`, with what is known of leader, workers and queue."""
    gateway = _gateway(request)
    view = gateway.monitor.view
    details: dict[str, Any] = {"live_requests": gateway.engine.reader.num_live, "pool": gateway.settings.pool}
    return _answer(gateway, details | (_describe(view) if view is not None else {}))


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """The exposition text."""
    return Response(_gateway(request).engine.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _gateway(request: Request) -> GatewayState:
    gateway: GatewayState = request.state.gateway
    return gateway


def _answer(gateway: GatewayState, details: dict[str, Any]) -> Response:
    components = gateway.components
    state, view = first_unready(components), gateway.monitor.view
    saturated_by = view.saturated_by if view is not None else ""
    body = _state(state) | {
        "saturated": bool(saturated_by),
        **({"saturated_by": saturated_by} if saturated_by else {}),
        **_stalled(view),
        "components": {name: _state(component) for name, component in components.items()},
        **details,
    }
    return _json(body) if state.is_ready else _json(body, 503, {"Retry-After": str(RETRY_AFTER_S)})


def _stalled(view: PoolView | None) -> dict[str, Any]:
    stats = view.stats if view is not None else None
    if stats is None or not stats.stall_reason:
        return {}
    return {"stalled": {"seconds": round(stats.stalled_s, 1), "reason": stats.stall_reason}}


def _state(state: Readiness) -> dict[str, Any]:
    if state.is_ready:
        return {"status": "ready"}
    told: dict[str, Any] = {"status": "unready", "reason": state.reason, "message": state.message}
    return told if state.progress is None else told | {"progress": state.progress}


def _worker(lease: Lease) -> dict[str, Any]:
    told = {"name": lease.name, "state": lease.state, "progress": lease.progress}
    return told | {"warning": lease.warning} if lease.warning else told


def _describe(view: PoolView) -> dict[str, Any]:
    stats = view.stats
    return {
        "leader": view.leader.instance if view.leader is not None else None,
        "workers": [_worker(lease) for lease in view.workers],
        "num_requests_running": stats.num_requests_running if stats is not None else None,
        "num_requests_waiting": stats.num_requests_waiting if stats is not None else None,
        "max_model_len": view.limits.max_model_len,
    }


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
