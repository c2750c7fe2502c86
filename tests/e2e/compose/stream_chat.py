"""Streams one chat from a running server and checks it. Needs only the standard library: stream_chat.py URL."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

DEADLINE_S = 120.0
QUESTION = "What is the capital of France?"


def wait_until_ready(url: str) -> None:
    """Returns once `/health/ready` answers 200.

    Raises:
        TimeoutError: not within the deadline; says the last answer.
    """
    last = ""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except urllib.error.HTTPError as error:
            last = error.read().decode(errors="replace")
        except OSError as error:
            last = str(error)
        time.sleep(0.5)
    raise TimeoutError(f"{url} is not ready: {last}")


def _headers() -> dict[str, str]:
    """With the key of the environment, if there is one."""
    key = os.environ.get("PAGEWIRE_API_KEY")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _get(url: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=_headers()), timeout=10) as answer:
        return json.load(answer)


def stream_events(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The data of each server-sent event."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), _headers())
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode().strip()


def main(url: str) -> None:
    wait_until_ready(url)
    model = _get(f"{url}/v1/models")["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": True,
    }
    *chunks, last = stream_events(url, body)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    print(f"{model}: {QUESTION} {text}")
    assert last == "[DONE]", last
    assert len(chunks) >= 3, "the answer came in one piece"
    assert choices[-1]["finish_reason"] in ("stop", "length"), choices[-1]
    assert "Paris" in text, text


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
