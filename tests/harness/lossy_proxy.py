"""A TCP proxy that can lose a reply: the request arrives, the answer does not."""

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class LossyProxy:
    """Forwards to the Redis of `url`. After `lose_reply(marker)`, the next request that holds `marker` is carried out,
    but its connection is cut before the answer. While `is_down`, connections are cut and refused."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._marker: bytes | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.num_lost = 0
        self.is_down = False
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply(self, marker: bytes) -> None:
        self._marker = marker

    def go_down(self) -> None:
        """Cut all connections and refuse new ones."""
        with self._lock:
            self.is_down = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        self.is_down = False

    def close(self) -> None:
        self.go_down()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            if self.is_down:
                return
            with socket.create_connection(self._target) as server:
                with self._lock:
                    self._open |= {client, server}
                lost = threading.Event()
                back = threading.Thread(target=self._pump_replies, args=(server, client, lost), daemon=True)
                back.start()
                self._pump_requests(client, server, lost)
                back.join()
                with self._lock:
                    self._open -= {client, server}

    def _pump_requests(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._marker is not None and self._marker in data:
                    self._marker = None
                    lost.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _pump_replies(self, server: socket.socket, client: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if lost.is_set():
                    self.num_lost += 1
                    break
                client.sendall(data)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
