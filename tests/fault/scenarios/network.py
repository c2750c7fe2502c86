"""Connections that are slow or break: between the services and Redis, and between clients and gateways."""

import contextlib
import random
import time
from urllib.parse import urlsplit

from services.cli import redis_server
from tests.harness.fault_run import FaultRun, Scene
from tests.harness.own_redis import running
from tests.harness.proxy import TcpProxy
from tests.harness.streams import StreamLoad

DELAYS_S = (0.005, 0.02, 0.05)
CUT_SHARE = 0.3
OUTAGE_S = 1.5
"""Shorter than a lease."""


def network(run: FaultRun) -> None:
    """All services reach Redis through a proxy that delays, resets connections at random, or is away for a moment."""
    folder = run.folder / "network-redis"
    folder.mkdir()
    own = redis_server.prepare(folder, redis_server.find_redis_server())
    with running(own), TcpProxy("127.0.0.1", own.port) as proxy:
        url = f"redis://:{own.password}@127.0.0.1:{proxy.port}/0"
        with run.scene("network", redis_url=url) as scene:
            _disturb(scene, proxy)


def client_resets(run: FaultRun) -> None:
    """Clients' connections to the gateways are reset at random; they take their streams up again."""
    with run.scene("client-resets") as scene, contextlib.ExitStack() as stack:
        targets = [urlsplit(url) for url in scene.stack.gateway_urls()]
        proxies = [stack.enter_context(TcpProxy(str(t.hostname), int(t.port or 0))) for t in targets]
        urls = [f"http://127.0.0.1:{proxy.port}" for proxy in proxies]
        rng, num_cut = random.Random(run.options.seed), 0
        with scene.load(run.options.streams, urls) as load:
            for _ in range(run.options.repeats):
                time.sleep(rng.uniform(0, 1))
                load.wait_in_flight(run.options.streams // 2)
                num_cut += rng.choice(proxies).cut(rng, CUT_SHARE)
        audit = scene.audit(load)
        if not audit.num_resumed:
            audit.faults.append("no stream was taken up again")
        run.add_audit(scene.name, audit, faults=num_cut)


def _disturb(scene: Scene, proxy: TcpProxy) -> None:
    rng = random.Random(scene.run.options.seed)
    with scene.load(scene.run.options.streams) as load:
        for _ in range(scene.run.options.repeats):
            _wait(scene, load, rng)
            _one_of(proxy, rng)
            scene.settle(load)
        proxy.delay_s = 0.0
    audit = scene.audit(load)
    if not (proxy.num_cut and proxy.num_delayed):
        audit.faults.append(f"{proxy.num_cut} connections were cut, {proxy.num_delayed} pieces delayed")
    scene.run.add_audit(scene.name, audit, faults=scene.run.options.repeats, cut=proxy.num_cut)


def _wait(scene: Scene, load: StreamLoad, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 1))
    load.wait_in_flight(scene.run.options.streams // 2)


def _one_of(proxy: TcpProxy, rng: random.Random) -> None:
    """A fault of the network, short enough for leases to live."""
    match rng.randrange(3):
        case 0:
            proxy.delay_s = rng.choice(DELAYS_S)
            time.sleep(OUTAGE_S)
            proxy.delay_s = 0.0
        case 1:
            proxy.cut(rng, CUT_SHARE)
        case _:
            proxy.go_down()
            time.sleep(rng.uniform(0, OUTAGE_S))
            proxy.come_back()
