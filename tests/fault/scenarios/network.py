"""Connections that are slow or break: between the services and Redis, and between clients and gateways."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import psutil

from services.cli import redis_server
from tests.harness.audit import Audit
from tests.harness.fault_run import FaultRun, Recovery, Scene
from tests.harness.own_redis import running
from tests.harness.proxy import TcpProxy
from tests.harness.streams import Outcome, StreamLoad

DELAYS_S = (0.005, 0.02, 0.05)
CUT_SHARE = 0.3
OUTAGE_S = 1.5
"""Shorter than a lease."""
AWAY_S, UNDERWAY_S = 30.0, 5.0
"""How long Redis is away, and how long what had left it may still reach clients."""


def network(run: FaultRun) -> None:
    """All services reach Redis through a proxy that delays, resets connections at random, or is away for a moment."""
    with _behind_proxy(run, "network") as (scene, proxy, _):
        _disturb(scene, proxy)


def redis_away(run: FaultRun) -> None:
    """Redis is away for far longer than any lease, with no connection at first, then without answers: all go on."""
    recovery = Recovery("redis-away, once it is back")
    with _behind_proxy(run, "redis-away") as (scene, proxy, server):
        before, outages = scene.pids, ((proxy.go_down, proxy.come_back), (server.suspend, server.resume))
        with scene.load(run.options.streams) as load:
            recovery.observe([_be_away(scene, load, *outage) for outage in outages])
        audit = _audit(scene, load, before)
        run.add_recovery(recovery)
        run.add_audit(scene.name, audit, faults=len(outages))


def _be_away(
    scene: Scene, load: StreamLoad, leave: Callable[[], None], come_back: Callable[[], None]
) -> tuple[list[Outcome], float]:
    """Streams in flight, and when Redis was back."""
    load.wait_in_flight(scene.run.options.streams)
    flying, left_at = load.in_flight, time.monotonic()
    leave()
    try:
        time.sleep(AWAY_S)
        told = sum(outcome.arrivals[-1] > left_at + UNDERWAY_S for outcome in flying)
        assert not told, f"{told} streams went on while Redis was away"
    finally:
        come_back()
    back_at = time.monotonic()
    scene.settle(load)
    return flying, back_at


def _audit(scene: Scene, load: StreamLoad, before: list[int]) -> Audit:
    """As ever; and nobody takes a network without Redis for a reason to end. `before`: pids."""
    audit = scene.audit(load)
    if scene.pids != before:
        audit.faults.append("processes were restarted")
    return audit


@contextlib.contextmanager
def _behind_proxy(run: FaultRun, name: str) -> Iterator[tuple[Scene, TcpProxy, psutil.Process]]:
    """A stack, what stands between it and its Redis, and that Redis."""
    folder = run.folder / f"{name}-redis"
    folder.mkdir()
    own = redis_server.prepare(folder, redis_server.find_redis_server())
    with running(own) as server, TcpProxy("127.0.0.1", own.port) as proxy:
        url = f"redis://:{own.password}@127.0.0.1:{proxy.port}/0"
        with run.scene(name, redis_url=url) as scene:
            yield scene, proxy, psutil.Process(server.pid)


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
    rng, before = random.Random(scene.run.options.seed), scene.pids
    with scene.load(scene.run.options.streams) as load:
        for _ in range(scene.run.options.repeats):
            _wait(scene, load, rng)
            _one_of(proxy, rng)
            scene.settle(load)
        proxy.delay_s = 0.0
    audit = _audit(scene, load, before)
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
