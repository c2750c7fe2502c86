"""The little of Pagewire's HTTP API that the command line itself calls."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from services.cli.resuming import ResumingStream, ServerError, message_of


def is_ready(url: str) -> str | None:
    """None if the gateway at `url` says ready, else its reason."""
    try:
        response = httpx.get(f"{url}/health/ready", timeout=2.0, trust_env=False)
    except httpx.HTTPError as error:
        return f"gateway: {error}"
    return None if response.status_code == httpx.codes.OK else _reason(response)


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]


def first_model(url: str, api_key: str = "") -> str:
    """The name of the served model.

    Raises:
        ServerError: there is none, or no server.
    """
    try:
        response = httpx.get(f"{url}/v1/models", headers=_headers(api_key), timeout=10.0)
    except httpx.HTTPError as error:
        raise ServerError(f"no server at {url} ({error}); start one with `pagewire up`, or give --url") from error
    _check(response)
    models = response.json().get("data") or []
    if not models:
        raise ServerError(f"{url} serves no model")
    return str(models[0]["id"])


def stream_chat(url: str, body: dict[str, Any], api_key: str = "") -> Iterator[str]:
    """Pieces of the answer as they arrive. Closing the iterator ends the request; the death of a gateway does not.

    Raises:
        ServerError: the server refused, failed, or the stream broke off and did not go on.
    """
    with contextlib.closing(iter(ResumingStream(url, "/v1/chat/completions", body, api_key=api_key))) as chunks:
        for chunk in chunks:
            yield from _texts(chunk.get("choices") or [])


def _texts(choices: Sequence[dict[str, Any]]) -> Iterator[str]:
    for choice in choices:
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _check(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    raise ServerError(f"HTTP {response.status_code}: {message_of(response)}")


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
