"""Runs a Redis that the command line configured."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.cli.redis_server import OwnRedis, answers


@contextmanager
def running(own: OwnRedis) -> Iterator["subprocess.Popen[bytes]"]:
    """The server, ready; ended by SIGTERM."""
    with subprocess.Popen(own.command, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 10
            while not answers(own.url):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            yield process
        finally:
            process.terminate()
