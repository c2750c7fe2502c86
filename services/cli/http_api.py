"""The little of Pagewire's HTTP API that the command line itself calls."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from services.cli.sse import DONE, SseParser
from shared.errors import PagewireError


class ServerError(PagewireError):
    """The server is unreachable or answered with an error; the message is for people."""


def is_ready(url: str) -> str | None:
    """None if the gateway at `url` says ready, else its reason."""
    try:
        response = httpx.get(f"{url}/health/ready", timeout=2.0, trust_env=False)
    except httpx.HTTPError as error:
        return f"gateway: {error}"
    return None if response.status_code == httpx.codes.OK else response.text[:300]


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
    """Pieces of the answer as they arrive. Closing the iterator ends the request.

    Raises:
        ServerError: the server refused, failed, or the stream broke off.
    """
    timeout = httpx.Timeout(10.0, read=None)
    try:
        with (
            httpx.Client(timeout=timeout, headers=_headers(api_key)) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                _check(response)
            yield from _pieces(response)
    except httpx.HTTPError as error:
        raise ServerError(f"{url}: {error}") from error


def _pieces(response: httpx.Response) -> Iterator[str]:
    parser = SseParser()
    for chunk in response.iter_raw():
        for event in parser.feed(chunk):
            if event.data == DONE:
                return
            message = json.loads(event.data)
            if message.get("error"):
                raise ServerError(str(message["error"].get("message", "error")))
            yield from _texts(message.get("choices") or [])
    raise ServerError("the stream broke off")


def _texts(choices: Sequence[dict[str, Any]]) -> Iterator[str]:
    for choice in choices:
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _check(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise ServerError(f"HTTP {response.status_code}: {message}")


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
