"""Case 137: what clients write is in no log line, metric, trace or key name, and what holds it has a time to live."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.ports import free_port
from shared.keys import Keys
from shared.messages import FinishReason, Submission
from shared.packing import pack_int32
from tests.fakes.byte_model import answer, spell
from tests.fakes.scripted_pool import Script, ScriptedPool
from tests.integration.gateway.test_process import ROOT, wait_ready

CANARY = "canary-Zq7"
ANSWER = "answer-Xw9"


def talk(url: str) -> list[str]:
    """Requests of every outcome; the answers that may hold no canary."""
    headers = {"Idempotency-Key": CANARY, "X-Resume-Window": "5", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    fields = {"user": CANARY, "cache_salt": CANARY, "stop": [CANARY], "metadata": {CANARY: CANARY}}
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
        chat = {"messages": [{"role": "system", "content": CANARY}, {"role": "user", "content": CANARY}]}
        assert http.post("/v1/chat/completions", json={**chat, **fields}, headers=headers).status_code == 200
        assert http.post("/v1/chat/completions", json={**chat, "n": 2}, headers=headers).status_code == 409
        assert http.post("/v1/completions", json={"prompt": f"error {CANARY}"}).status_code == 500
        for poison in ({"prompt": CANARY, "temperature": CANARY}, {"prompt": [CANARY, 1]}, {"prompt": {CANARY: 1}}):
            assert http.post("/v1/completions", json=poison).status_code == 400
        assert http.post("/v1/completions", content=f'{{"prompt": "{CANARY}'.encode()).status_code == 400
        http.get(f"/v1/requests/{CANARY}")
        http.get(f"/v1/models/{CANARY}")
        with http.stream("POST", "/v1/completions", json={"prompt": f"held {CANARY}", "stream": True}) as response:
            request_id = response.headers["x-request-id"]
            told = [http.get(path).text for path in ("/metrics", "/health", "/v1/requests")]
            told.append(http.get(f"/v1/requests/{request_id}").text)
    return told


def script(submission: Submission) -> Script:
    prompt = bytes(submission.prompt_tokens[::4])
    if b"error" in prompt:
        return Script(spell(ANSWER), end=None, event=FinishReason.ERROR, message="a worker's words")
    return Script(spell(ANSWER), end=None) if b"held" in prompt else answer(ANSWER)


def values_of(pool: ScriptedPool, name: Any) -> bytes:
    client: Any = pool.client
    kind, parts = client.type(name), []
    if kind == b"hash":
        parts = [part for pair in client.hgetall(name).items() for part in pair]
    elif kind == b"stream":
        parts = [value for _, fields in client.xrange(name) for value in fields.values()]
    elif kind == b"string":
        parts = [client.get(name) or b""]
    else:
        parts = client.smembers(name) if kind == b"set" else client.zrange(name, 0, -1)
    return b"".join(parts)


SECRETS = [secret for text in (CANARY, ANSWER) for secret in (text.encode(), pack_int32(spell(text)))]


@pytest.mark.parametrize("level", ["debug", "info"])
def test_no_text_is_told_to_anybody_else(
    byte_model: Path, redis_url: str, keys: Keys, tmp_path: Path, level: str
) -> None:
    port = free_port()
    environment = {
        "PAGEWIRE_MODEL": str(byte_model),
        "PAGEWIRE_REDIS_URL": redis_url,
        "PAGEWIRE_PORT": str(port),
        "PAGEWIRE_POOL": "test",
        "PAGEWIRE_LOG_LEVEL": level,
        "PAGEWIRE_TRACE_EXPORTER": "console",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
    }
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "services.gateway"]
    with ScriptedPool(redis_url, keys, script) as pool, open(tmp_path / "log", "wb") as log:
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process:
            try:
                wait_ready(url)
                told = talk(url)
            finally:
                process.terminate()
                process.wait(20)
        logged = (tmp_path / "log").read_text()
        assert "generation_failed" in logged and "gen_ai.response.id" in logged  # log and trace are there
        for text in (logged, *told):
            assert CANARY not in text and ANSWER not in text and "canary" not in text.lower()
        holders = []
        names: Any = pool.client.keys("*")
        for name in names:
            assert CANARY.encode() not in name
            values = values_of(pool, name)
            if any(
                secret in values for text in (CANARY, ANSWER) for secret in (text.encode(), pack_int32(spell(text)))
            ):
                holders.append(name)
                assert pool.client.ttl(name) > 0, name
        assert any(b":request:" in name for name in holders)
