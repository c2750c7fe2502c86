"""The ACL files of infra/redis: each service does all of its work as its own user, and nothing else."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from services.cli.ports import free_port
from services.cli.redis_server import find_redis_server
from services.gateway.text.tokenizer import TextTokenizer
from shared.keys import Keys
from shared.messages import Abort
from shared.redis_client import connect
from tests.fakes.byte_model import answer, write_byte_model
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.scripted_pool import Script, ScriptedPool
from tests.integration.scheduler.conftest import Pool, wait_for

FILES = Path(__file__).parents[3] / "infra" / "redis"
SERVICES = ("gateway", "scheduler", "worker")


@pytest.fixture(scope="module")
def guarded_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Redis that start.sh started."""
    folder, port = tmp_path_factory.mktemp("acl"), free_port()
    passwords = {f"REDIS_{service.upper()}_PASSWORD": f"{service}-pw" for service in SERVICES}
    binary = find_redis_server().path
    (folder / "redis-server").symlink_to(binary)
    files = shutil.copytree(FILES, folder / "files")
    config = files / "redis.conf"
    config.write_text(config.read_text().replace("dir /data", f"dir {folder}"))
    environment = {
        **passwords,
        "REDIS_PASSWORD": "admin-pw",
        "PAGEWIRE_REDIS_FILES": str(files),
        "PAGEWIRE_REDIS_DATA": str(folder),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    options = ["--port", str(port), "--bind", "127.0.0.1"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(["sh", files / "start.sh", *options], env=environment, stdout=log, stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            raise RuntimeError((folder / "log").read_text())
        yield port
    finally:
        process.terminate()
        process.wait(10)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "who stops the script's process stops Redis"


@pytest.fixture
def url(guarded_port: int) -> Iterator[str]:
    """The administrator's, for tests; `as_user` makes those of services."""
    admin = f"redis://:admin-pw@127.0.0.1:{guarded_port}/0"
    client = connect(admin)
    client.flushall()
    client.execute_command("ACL", "LOG", "RESET")
    yield admin
    denied = client.execute_command("ACL", "LOG")
    client.close()
    assert denied == [], "a service was refused something that it needs"


def as_user(url: str, service: str) -> str:
    return url.replace(":admin-pw@", f"pagewire-{service}:{service}-pw@")


def test_a_gateway_does_its_work(url: str, keys: Keys, tmp_path: Path) -> None:
    model = write_byte_model(tmp_path)
    key_file = tmp_path / "keys.toml"
    key_file.write_text(
        f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\n[[keys]]\nname = "b"\nmax_concurrent = 2\n'
        'tokens_per_minute = 100000\nsha256 = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"\n'
    )  # "secret"
    scripts = {"go": answer("text"), "held": Script(b"abc", end=None)}

    def script(submission: object) -> Script:
        prompt = bytes(submission.prompt_tokens[::4]).decode(errors="replace")  # type: ignore[attr-defined]
        return next((s for name, s in scripts.items() if name in prompt), answer("OK"))

    gateway = RunningGateway(
        TextTokenizer.from_folder(model), model=model, redis_url=as_user(url, "gateway"), api_key_file=key_file
    )
    with ExitStack() as stack:
        pool = stack.enter_context(ScriptedPool(url, keys, script))
        stack.enter_context(gateway).wait_ready()
        http, headers = gateway.http, {"Authorization": "Bearer secret", "Idempotency-Key": "k"}
        http.headers["Authorization"] = "Bearer secret"
        made = http.post("/v1/completions", json={"prompt": "go", "n": 2}, headers=headers).json()
        assert http.post("/v1/completions", json={"prompt": "go", "n": 2}, headers=headers).json() == made
        assert http.get(f"/v1/requests/{made['id']}/stream").text.endswith("data: [DONE]\n\n")
        body = {"prompt": "held", "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers={"X-Resume-Window": "1"}) as response:
            request_id = response.headers["x-request-id"]
            assert [e["id"] for e in http.get("/v1/requests").json()["data"]] == [request_id]
        (abort,) = pool.wait_for(lambda: pool.messages(Abort), timeout_s=8)
        assert abort.cause == "window_expired"
        assert http.delete(f"/v1/requests/{request_id}").status_code == 200


def test_scheduler_and_worker_do_their_work(url: str, keys: Keys) -> None:
    """Also a start from a snapshot, and one from records alone."""
    pool = Pool(url, keys)
    pool.settings = pool.settings.model_copy(update={"redis_url": as_user(url, "scheduler")})
    try:
        first = pool.scheduler().start()
        pool.url = as_user(url, "worker")
        pool.worker(step_s=0.002)
        pool.url = url
        pool.submit(6, max_tokens=60)
        wait_for(lambda: pool.steps() > 20)
        first.crash()
        second = pool.scheduler().start()
        wait_for(lambda: second.leader is not None)
        pool.submit(2, max_tokens=60)
        second.crash()
        pool.client.delete(keys.snapshot)
        pool.scheduler().start()
        pool.wait_until_ended(40)
        pool.check_texts()
    finally:
        for worker in pool.workers:
            worker._dead.set()
        for scheduler in pool.schedulers:
            scheduler.crash()
        for worker in pool.workers:
            worker.stop()
        pool.client.close()


@pytest.mark.parametrize(
    ("service", "command"),
    [
        ("gateway", ("HSET", "pw:{p}:fence", "epoch", "9")),
        ("gateway", ("XADD", "pw:{p}:plans:worker-0:1", "*", "m", "x")),
        ("gateway", ("SET", "pw:{p}:snapshot", "x")),
        ("gateway", ("FLUSHALL",)),
        ("gateway", ("KEYS", "*")),
        ("worker", ("HGETALL", "pw:{p}:request:r")),
        ("worker", ("XREAD", "STREAMS", "pw:{p}:intake", "0")),
        ("worker", ("CONFIG", "GET", "requirepass")),
        ("scheduler", ("SET", "elsewhere", "x")),
        ("scheduler", ("CONFIG", "GET", "*")),
        ("scheduler", ("SHUTDOWN",)),
    ],
)
def test_what_is_not_its_business_is_refused(guarded_port: int, service: str, command: tuple[str, ...]) -> None:
    client = connect(f"redis://pagewire-{service}:{service}-pw@127.0.0.1:{guarded_port}/0")
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)
    client.close()


def test_nobody_comes_in_without_a_password(guarded_port: int) -> None:
    for user in ("", "pagewire-gateway:wrong@", "pagewire-worker:gateway-pw@"):
        client = connect(f"redis://{user}127.0.0.1:{guarded_port}/0")
        with pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
        client.close()
