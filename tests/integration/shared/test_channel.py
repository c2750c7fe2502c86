"""The direct connection: replies come raw and in order, and after anything unsure it is a new connection."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from services.cli.redis_server import find_redis_server, prepare
from shared import channel as channel_module
from shared.channel import MANY_WORDS, Channel, join_words, pack_words
from shared.keys import Keys
from shared.messages import FIELD
from shared.redis_client import RedisFailure, connect, open_channel, open_channel_blocking
from shared.streams import Entry, raw_entries, read, read_channel, xread
from tests.harness.own_redis import running


@pytest.fixture
def channel(redis_url: str) -> Iterator[Channel]:
    with closing(open_channel(redis_url, timeout_s=0.3)) as opened:
        yield opened


def client_id(channel: Channel) -> int:
    return int(channel.execute("CLIENT", "ID"))


@contextmanager
def server(*answers: list[bytes]) -> Iterator[str]:
    """A Redis that answers connection k with the pieces `answers[k]`, one by one, and then closes it; its URL."""

    def serve() -> None:
        for pieces in answers:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while b"ASK" not in connection.recv(65536):
                    connection.sendall(b"+OK\r\n")  # whatever a client says of itself at first
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.001)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        thread.join(5)
        assert not thread.is_alive()


# ---------------------------------------------------------------- replies


def test_replies_come_raw_and_in_order(channel: Channel) -> None:
    assert channel.execute("SET", "k", b"\x00\xff") == b"OK"
    assert channel.execute_all([("GET", "k"), ("INCR", "n"), ("GET", "none"), ("LRANGE", "l", 0, -1)]) == [
        b"\x00\xff",
        1,
        None,
        [],
    ]


def test_a_refused_command_spoils_neither_the_others_nor_the_connection(channel: Channel) -> None:
    number = client_id(channel)
    first, refused, last = channel.execute_all([("SET", "k", "text"), ("XADD", "k", "*", "m", "x"), ("GET", "k")])
    assert (first, last) == (b"OK", b"text")
    assert isinstance(refused, redis.ResponseError) and "WRONGTYPE" in str(refused)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        read_channel(channel, {"k": "0-0"})
    with pytest.raises(redis.exceptions.NoScriptError):
        channel.execute("EVALSHA", "0" * 40, 0)
    assert client_id(channel) == number


def test_an_answer_larger_than_any_buffer_is_whole(channel: Channel) -> None:
    big = bytes(range(256)) * 40_000
    assert channel.execute_all([("SET", "k", big), ("GET", "k")]) == [b"OK", big]


def test_a_command_may_be_packed_in_parts(channel: Channel) -> None:
    """More words than are packed at a time, of every kind."""
    values = [f"{n}" for n in range(2 * MANY_WORDS + 1)]
    command = join_words(pack_words(["RPUSH", "l"]), pack_words(values), pack_words([b"\x00", 2.5, 7]))
    length, all_of_it = channel.execute_all([command, ("LRANGE", "l", 0, -1)])
    assert length == len(values) + 3
    assert all_of_it == [*(value.encode() for value in values), b"\x00", b"2.5", b"7"]


def test_streams_read_the_same_as_through_the_client(channel: Channel, redis_client: redis.Redis, keys: Keys) -> None:
    fields: list[dict[Any, Any]] = [{FIELD: b"one"}, {b"x": b"y"}, {b"x": b"y", FIELD: b"two"}, {FIELD: b""}]
    for number, entry in enumerate(fields):
        redis_client.xadd(keys.steps, entry, id=f"{number + 1}-0")
    redis_client.xadd(keys.intake, {FIELD: b"i"}, id="5-0")
    positions = {keys.steps: "0-0", keys.intake: "0-0", keys.snapshot: "0-0"}
    news = read_channel(channel, positions, count=100)
    assert news == read(redis_client, positions, count=100)
    assert news[keys.steps] == [Entry("1-0", b"one"), Entry("2-0", b""), Entry("3-0", b"two"), Entry("4-0", b"")]
    assert [len(entries) for entries in read_channel(channel, positions, count=2).values()] == [2, 1]
    assert read_channel(channel, {keys.steps: "4-0"}, block_ms=1) == {}


def test_replies_may_be_received_later(channel: Channel, redis_client: redis.Redis) -> None:
    channel.send_all([("ECHO", "now"), xread({"s": "0-0"}, block_ms=200)])
    assert channel.receive_all(1) == [b"now"]
    assert channel.is_awaited
    redis_client.xadd("s", {FIELD: b"news"}, id="1-0")
    assert raw_entries(channel.receive()) == {"s": [Entry("1-0", b"news")]}
    assert not channel.is_awaited


# ---------------------------------------------------------------- what goes wrong


def test_a_reply_that_nobody_received_answers_nothing_else(channel: Channel) -> None:
    number = client_id(channel)
    channel.send_all([("ECHO", "unread"), xread({"s": "0-0"}, block_ms=200)])
    assert channel.execute("ECHO", "mine") == b"mine"
    assert not channel.is_awaited and client_id(channel) != number


def test_a_command_that_timed_out_leaves_no_reply_to_the_next_one(channel: Channel, redis_client: redis.Redis) -> None:
    number = client_id(channel)
    with pytest.raises(RedisFailure):
        read_channel(channel, {"s": "0-0"}, block_ms=5000)
    redis_client.xadd("s", {FIELD: b"late"})
    assert channel.execute("ECHO", "mine") == b"mine"
    assert client_id(channel) != number


def test_a_blocking_reader_waits_longer_than_redis_blocks(redis_url: str) -> None:
    """Case 112."""
    with closing(open_channel_blocking(redis_url, block_s=0.4)) as reader:
        number = client_id(reader)
        assert read_channel(reader, {"s": "0-0"}, block_ms=400) == {}
        assert client_id(reader) == number


def test_a_cancelled_command_closes_the_connection(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 114."""
    number = client_id(channel)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(channel, "_reply", interrupt)
        channel.execute("ECHO", "unread")
    assert channel.execute("ECHO", "mine") == b"mine"
    assert client_id(channel) != number


def test_a_reply_in_pieces_is_one_reply() -> None:
    reply = b"*2\r\n$5\r\nfirst\r\n:17\r\n"
    with (
        server([reply[i : i + 1] for i in range(len(reply))]) as url,
        closing(Channel(connect(url))) as channel,
    ):
        assert channel.execute("ASK") == [b"first", 17]


def test_a_reply_cut_by_a_dying_server_is_a_failure_and_the_next_call_connects_anew() -> None:
    with server([b"$9\r\nhalf"], [b"+again\r\n"]) as url, closing(Channel(connect(url))) as channel:
        with pytest.raises(RedisFailure):
            channel.execute("ASK")
        assert channel.execute("ASK") == b"again"


def test_a_server_that_loads_its_data_is_a_failure() -> None:
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    with server([loading], [b"+ready\r\n"]) as url, closing(Channel(connect(url))) as channel:
        with pytest.raises(RedisFailure, match="loading"):
            channel.execute("ASK")
        assert channel.execute("ASK") == b"ready"


def test_an_idle_connection_that_the_server_closed_is_not_used(
    channel: Channel, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `timeout` in redis.conf. Without the look, the first command after it would be lost."""
    redis_client.execute_command("CLIENT", "KILL", "ID", client_id(channel))
    with pytest.raises(RedisFailure):
        channel.execute("PING")
    redis_client.execute_command("CLIENT", "KILL", "ID", client_id(channel))
    monkeypatch.setattr(channel_module, "FRESH_S", 0.0)
    assert channel.execute("ECHO", "mine") == b"mine"


def test_redis_restarts_behind_a_password_and_a_unix_socket(tmp_path: Path) -> None:
    own = prepare(tmp_path, find_redis_server())
    channel = open_channel(own.url)
    with running(own):
        assert channel.execute("SET", "k", "kept") == b"OK"
    with pytest.raises(RedisFailure):
        channel.execute("GET", "k")
    with pytest.raises(RedisFailure):
        channel.execute("GET", "k")
    with running(own):
        assert channel.execute("GET", "k") == b"kept"
        channel.close()


def test_a_wrong_password_is_a_failure(tmp_path: Path) -> None:
    own = prepare(tmp_path, find_redis_server())
    with (
        running(own),
        closing(open_channel(own.url.replace(own.password, "guessed"))) as channel,
        pytest.raises(RedisFailure, match="password"),
    ):
        channel.execute("PING")


def test_tls_addresses_get_a_tls_connection() -> None:
    channel = open_channel("rediss://127.0.0.1:1/0")
    assert isinstance(channel._connection, redis.SSLConnection)
    with pytest.raises(RedisFailure):
        channel.execute("PING")
