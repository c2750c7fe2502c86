"""A request of which it is not known whether it was accepted: the resuming client asks again instead of giving up.

Seen with a gateway that was killed between the submission and its reply while no scheduler was there: the next gateway
answered 503, the client gave up, and the request was computed for nobody.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.cli.resuming import ResumingStream, ServerError

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
LIMITED = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
BROKEN = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: r\r\nconnection: close\r\n\r\n"
    b'id: 1\ndata: {"choices": []}\n\n'
)
ANSWER = BROKEN + b"data: [DONE]\n\n"


@contextmanager
def server(answers: list[bytes]) -> Iterator[str]:
    """One connection for each answer; an empty one is a connection that breaks after the request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def test_it_asks_again_if_the_request_may_have_been_accepted() -> None:
    with server([b"", UNAVAILABLE, ANSWER]) as url:
        assert list(ResumingStream(url, "/v1/completions", {})) == [{"choices": []}]


def test_a_stream_whose_former_connection_still_counts_is_not_given_up() -> None:
    """A key's streams are counted, and a gateway may not have noticed yet that the client left."""
    with server([BROKEN, LIMITED, ANSWER]) as url:
        stream = ResumingStream(url, "/v1/completions", {})
        assert len(list(stream)) == 2 and stream.num_resumed == 2


@pytest.mark.parametrize("refusal", [UNAVAILABLE, LIMITED])
def test_a_first_refusal_is_told_at_once(refusal: bytes) -> None:
    with server([refusal]) as url, pytest.raises(ServerError, match=r"HTTP (503|429)"):
        list(ResumingStream(url, "/v1/completions", {}))
