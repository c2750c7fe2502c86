"""Sizes are checked before contents, JSON before meaning."""

from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from services.gateway.http import body
from shared.errors import InvalidRequest, QueueFull


def receiving(*messages: dict[str, Any]) -> Any:
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        return queue.pop(0)

    return receive, queue


def part(data: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def anything(_: int) -> None:
    """Room for whatever comes."""


async def test_joins_chunks() -> None:
    receive, _ = receiving(part(b"ab", True), part(b"", True), part(b"c", False))
    assert await body.read_body(receive, Headers({}), 3, anything) == b"abc"


async def test_counts_chunks_of_a_body_without_length() -> None:
    receive, rest = receiving(*[part(b"x" * 10, True)] * 3, part(b"", False))
    with pytest.raises(InvalidRequest) as caught:
        await body.read_body(receive, Headers({}), 25, anything)
    assert caught.value.status == 413
    assert rest == [], "the rest is drained, so that the answer survives"


async def test_drains_no_more_than_a_bound() -> None:
    receive, rest = receiving(*[part(b"x" * 10, True)] * 100)
    with pytest.raises(InvalidRequest):
        await body.read_body(receive, Headers({"content-length": "1000"}), 10, anything)
    assert len(rest) == 100 - body.DRAIN_FACTOR


async def test_a_client_that_asks_first_is_told_without_reading() -> None:
    receive, rest = receiving(part(b"x", False))
    with pytest.raises(InvalidRequest):
        await body.read_body(receive, Headers({"content-length": "1000", "expect": "100-continue"}), 10, anything)
    assert len(rest) == 1


async def test_a_lost_client_is_no_error_of_ours() -> None:
    receive, _ = receiving(part(b"x", True), {"type": "http.disconnect"})
    with pytest.raises(ClientDisconnect):
        await body.read_body(receive, Headers({}), 10, anything)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"1", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\\ud800"}',
                                  b'{"a": "\xff"}', b"[" * 100_000, b'{"a":' * 50_000, b'{"a": 1e400}'])  # fmt: skip
def test_refuses_what_is_not_strict_json(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body.parse_json(data)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"
    assert len(caught.value.message) < 200


def test_text_is_not_normalised() -> None:
    assert body.parse_json('{"a": "é e\u0301 \\ud83d\\ude00"}'.encode()) == {"a": "é e\u0301 😀"}


async def test_bodies_share_their_room_and_give_it_back() -> None:
    room = body.BodyRoom(25)
    with room.place() as take, room.place() as other:
        receive, _ = receiving(part(b"x" * 10, True), part(b"x" * 10, False))
        assert len(await body.read_body(receive, Headers({}), 100, take)) == 20
        receive, rest = receiving(part(b"x" * 10, True), part(b"x" * 10, False))
        with pytest.raises(QueueFull):
            await body.read_body(receive, Headers({}), 100, other)
        assert len(rest) == 1 and room.taken == 20
    assert room.taken == 0
