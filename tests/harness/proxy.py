"""A TCP proxy that delays, cuts and refuses: a slow or broken network, or clients that are reset."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from typing import Self

READ_BYTES = 65536


class TcpProxy:
    """Forwards connections to `host:port` from a thread of its own, as a context manager.

    `delay_s` holds every piece of data back so long, in both directions. While `is_down` connections are refused.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        """The client's side of every open connection, in the order in which they came."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._num_accepted = 0
        self.delay_s = 0.0
        self.is_down = False
        self.num_cut = 0
        self.num_delayed = 0
        """Pieces of data that were held back."""
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *error: object) -> None:
        self.go_down()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def num_open(self) -> int:
        return len(self._writers)

    def cut(self, rng: random.Random, share: float = 1.0) -> int:
        """Reset a random share of the open connections, at least one; how many they were."""
        return asyncio.run_coroutine_threadsafe(self._cut(rng, share), self._loop).result(10)

    def go_down(self) -> None:
        """Reset all connections and refuse new ones."""
        self.is_down = True
        self.cut(random.Random(0))

    def come_back(self) -> None:
        self.is_down = False

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cut(self, rng: random.Random, share: float) -> int:
        numbers = [number for number, writer in self._writers.items() if not writer.transport.is_closing()]
        chosen = rng.sample(numbers, min(len(numbers), max(1, round(share * len(numbers)))))
        for number in chosen:
            _reset(self._writers[number])
        self.num_cut += len(chosen)
        return len(chosen)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._num_accepted += 1
        number = self._num_accepted
        self._writers[number] = writer
        try:
            with contextlib.suppress(OSError):
                if self.is_down:
                    _reset(writer)
                else:
                    await self._join(reader, writer)
        finally:
            del self._writers[number]
            self._tasks.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both directions, until one of them ends."""
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        try:
            pumps = [asyncio.ensure_future(self._pump(reader, far_writer))]
            pumps.append(asyncio.ensure_future(self._pump(far_reader, writer)))
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            if self.delay_s:
                self.num_delayed += 1
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close without the usual good-bye: the other side gets an error."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
