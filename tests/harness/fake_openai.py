"""A tiny server that speaks the client side of the HTTP API, to test clients of it: known words, known timing."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class FakeOpenAI:
    """What it answers, and what it was asked."""

    url: str = ""
    words: tuple[str, ...] = ("Hello", " wörld", "!")
    delay_s: float = 0.0
    """Before each word."""
    break_off: bool = False
    """End the stream without [DONE]."""
    fail_every: int = 0
    """Every n-th request gets a 429."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    peak: int = 0
    """Most requests that ran at once."""
    _running: dict[int, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, body: dict[str, Any]) -> int:
        """Note a request; its number from 1."""
        with self._lock:
            self.requests.append(body)
            number = len(self.requests)
            self._running[number] = None
            self.peak = max(self.peak, len(self._running))
            return number

    def leave(self, number: int) -> None:
        """It ends: to be called before its end is told, since whoever reads that may come again at once."""
        with self._lock:
            self._running.pop(number, None)


def _handler(fake: FakeOpenAI) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self._answer(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = fake.enter(body)
            try:
                if fake.fail_every and number % fake.fail_every == 0:
                    fake.leave(number)
                    self._answer(429, {"error": {"message": "queue is full"}})
                else:
                    self._stream(body, number)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                fake.leave(number)

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, body: dict[str, Any], number: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for count, word in enumerate(fake.words, start=1):
                time.sleep(fake.delay_s)
                self._event(f"id: {count}\ndata: {json.dumps({'choices': [_choice(self.path, word)]})}\n\n")
            if not fake.break_off:
                fake.leave(number)
                usage = {"prompt_tokens": 7, "completion_tokens": len(fake.words)}
                self._event(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def _event(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    return Handler


def _choice(path: str, word: str) -> dict[str, Any]:
    return (
        {"index": 0, "text": word}
        if path.endswith("/completions") and "chat" not in path
        else {
            "index": 0,
            "delta": {"content": word},
        }
    )


@contextmanager
def fake_openai(**options: Any) -> Iterator[FakeOpenAI]:
    """A running server on a free port."""
    fake = FakeOpenAI(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
