"""`python -m tests.harness.health_probe URL`: asks for health until its input ends; prints each answer's time.

A process of its own, so that what is measured is the server and not a client that is busy.
"""

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

INTERVAL_S = 0.02


def probe(url: str) -> list[float]:
    """Seconds that each answer took, a new connection each; infinity where there was none."""
    parts, times = urlsplit(url), []
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        started = time.perf_counter()
        times.append(time.perf_counter() - started if _answers(parts.netloc, parts.path) else float("inf"))
    return times


def _answers(netloc: str, path: str) -> bool:
    connection = http.client.HTTPConnection(netloc, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
