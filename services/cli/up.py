"""`pagewire up`: from nothing to a served model, and back.

    check      state directory free, port free, Redis there or startable, model there (or pulled)
    start      Redis, scheduler, workers, gateway
    wait       workers load and warm up, the scheduler admits them, the gateway is ready
    keep       children that die are started again
    stop       gateway, scheduler, workers, Redis

An error before `keep` ends everything that was started.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping

import msgspec

from services.cli import composition, redis_server
from services.cli.deaths import DeathReporter
from services.cli.log_follower import LogFollower
from services.cli.models import ensure_model
from services.cli.ready import Readiness
from services.cli.screen import PlainScreen, Screen, open_screen
from services.cli.settings import Settings
from services.cli.signals import SignalInbox, StopRequested
from services.cli.state_dir import RunState, StateDir
from services.cli.supervisor import ChildFailed, Supervisor
from services.gateway.access import check_callers, load_keys
from shared.errors import ConfigError, Unavailable
from shared.keys import Keys
from shared.leases import new_instance
from shared.model_store import ResolvedModel, resolve
from shared.redis_client import connect

INTERRUPTED = 130
REDIS_TIMEOUT_S = 120.0
"""A long append-only file takes a while to load."""


def up(settings: Settings) -> int:
    """Serve until a stop signal; answers the exit code.

    Raises:
        ConfigError: an option, model, port or Redis that it cannot start with.
        ChildFailed: a process ended while starting.
        Unavailable: not ready in time.
    """
    state_dir = StateDir(settings.state_dir)
    state_dir.create()
    keys = Keys(settings.pool)
    with SignalInbox() as inbox, state_dir.lock():
        check_access(settings)
        port = check_port(settings.host, settings.port)
        resolve(settings.model, settings.home)
        stack = Stack(settings, keys, state_dir, inbox, port, dict(os.environ))
        try:
            with open_screen() as screen:
                stack.start(screen)
            print(stack.addresses, flush=True)
            stack.supervisor.run()
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("stopping; Ctrl-C again kills at once", file=sys.stderr, flush=True)
        except StopRequested:
            return INTERRUPTED
        finally:
            stack.stop()
    return 0


def check_access(settings: Settings) -> None:
    """
    Raises:
        ConfigError: a key file that is none, or everybody could call.
    """
    key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
    check_callers(load_keys(key, settings.api_key_file), settings.host, insecure=settings.insecure)


def check_port(host: str, port: int) -> int:
    """The port to serve on; a free one if `port` is 0.

    Raises:
        ConfigError: it is in use, or the host is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            chosen: int = probe.getsockname()[1]
            return chosen
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def serve_url(host: str, port: int) -> str:
    """The address as it is told to people."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_url(host: str, port: int) -> str:
    """The address under which this machine reaches a server that listens on `host`."""
    return serve_url({"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host), port)


def _gateway_urls(settings: Settings, port: int) -> dict[str, str]:
    """Name → address of each gateway alone. A single one has no port besides the one that clients know."""
    count = settings.gateways
    ports = [port] if count == 1 else [check_port(settings.host, 0) for _ in range(count)]
    return {f"gateway-{index}": local_url(settings.host, own) for index, own in enumerate(ports)}


class Stack:
    """The processes of one `pagewire up`."""

    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        state_dir: StateDir,
        inbox: SignalInbox,
        port: int,
        environ: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._state_dir = state_dir
        self._inbox = inbox
        self._port = port
        self._environ = environ
        self._deaths: DeathReporter | None = None
        self._run_state = RunState(
            os.getpid(),
            url=serve_url(settings.host, port),
            local_url=local_url(settings.host, port),
            redis_url="",
            pool=settings.pool,
            model=settings.model,
            gateways=_gateway_urls(settings, port),
        )
        self._closing = contextlib.ExitStack()
        self._screen: Screen | None = None
        self.supervisor = Supervisor(
            inbox,
            state_dir.logs,
            new_instance=new_instance,
            report_death=self._report_death,
            notice=self._notice,
            on_change=self._write_state,
        )

    @property
    def url(self) -> str:
        """The address as it is told to people."""
        return self._run_state.url

    @property
    def addresses(self) -> str:
        """For people and programs: each gateway's own address if there are several, then `ready` and the shared one."""
        own = [f"{name} {url}" for name, url in self._run_state.gateways.items()]
        return "\n".join([*(own if len(own) > 1 else []), f"ready {self.url}"])

    # ------------------------------------------------------------ start

    def start(self, screen: Screen) -> None:
        """Start everything and return when clients can be served."""
        with self._showing(screen):
            settings = self._settings
            if settings.verbose:
                self._closing.callback(LogFollower(self._state_dir.logs, sys.stderr).start().stop)
            model = ensure_model(
                settings.model,
                settings.home,
                self._environ,
                self._inbox,
                screen,
                with_gguf=settings.quantization == "gguf",
            )
            redis_url = self._start_redis(screen)
            self._deaths = DeathReporter(redis_url, self._keys).start()
            self._closing.callback(self._deaths.stop)
            self._run_state = msgspec.structs.replace(self._run_state, redis_url=redis_url, model=model.served_name)
            workers = self._start_services(model, redis_url)
            self._await_ready(redis_url, workers, screen)

    def _start_redis(self, screen: Screen) -> str:
        settings = self._settings
        url = settings.redis_url or self._start_own_redis(screen)
        for text in redis_server.check_given(url, settings.durability):
            screen.note(text)
        return url

    def _start_own_redis(self, screen: Screen) -> str:
        binary, durability = redis_server.find_redis_server(), self._settings.durability
        own = redis_server.prepare(self._state_dir.redis, binary, durability)
        self.supervisor.start(composition.redis_spec(own, self._environ))
        screen.progress("starting Redis", None, own.binary.version)
        self._wait_for_redis(own.url)
        screen.finish("starting Redis")
        return own.url

    def _wait_for_redis(self, url: str) -> None:
        deadline = time.monotonic() + REDIS_TIMEOUT_S
        while not redis_server.answers(url):
            if time.monotonic() > deadline:
                raise Unavailable(f"Redis does not answer after {REDIS_TIMEOUT_S:g} s", reason="redis")
            self.supervisor.wait(0.02)

    def _start_services(self, model: ResolvedModel, redis_url: str) -> list[tuple[str, str]]:
        """Start schedulers, workers and gateways; answers (name, instance) of the workers."""
        settings = self._settings
        environment = composition.shared_environment(
            settings,
            self._environ,
            redis_url=redis_url,
            model=model.require_folder(),
            served_name=settings.served_model_name or model.served_name,
        )
        for index in range(settings.schedulers):
            self.supervisor.start(composition.scheduler_spec(environment, index))
        specs = [composition.worker_spec(environment, index, settings.workers) for index in range(settings.workers)]
        children = [self.supervisor.start(spec) for spec in specs]
        for index, url in enumerate(self._run_state.gateways.values()):
            own_port = int(url.rpartition(":")[2])
            private_port = own_port if settings.gateways > 1 else 0
            self.supervisor.start(composition.gateway_spec(settings, environment, self._port, index, private_port))
        return [(child.spec.name, child.instance) for child in children]

    def _await_ready(self, redis_url: str, workers: list[tuple[str, str]], screen: Screen) -> None:
        client = connect(redis_url, timeout_s=2.0)
        self._closing.callback(client.close)
        readiness = Readiness(client, self._keys, workers, tuple(self._run_state.gateways.values()))
        deadline = time.monotonic() + self._settings.start_timeout_s
        while True:
            states = readiness.workers()
            for worker in states:
                screen.progress(f"loading {worker.name}", worker.progress)
            if readiness.is_ready(states):
                break
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"not ready after {self._settings.start_timeout_s:g} s: {readiness.reason}", reason="timeout"
                )
            self.supervisor.wait(0.1)
        for worker in states:
            screen.finish(f"loading {worker.name}")
            if worker.warning:
                screen.note(f"warning: {worker.name}: {worker.warning}")

    # ------------------------------------------------------------ stop

    def stop(self) -> None:
        """End everything; safe at any point of `start`."""
        try:
            self.supervisor.stop()
        finally:
            self._closing.close()
            self._state_dir.clear()

    # ------------------------------------------------------------ called by the supervisor

    def _report_death(self, instance: str) -> None:
        if self._deaths is not None:
            self._deaths.report(instance)

    def _write_state(self) -> None:
        self._state_dir.write(msgspec.structs.replace(self._run_state, children=self.supervisor.states()))

    @contextlib.contextmanager
    def _showing(self, screen: Screen) -> Iterator[None]:
        self._screen = screen
        try:
            yield
        finally:
            self._screen = None

    def _notice(self, text: str) -> None:
        """Tell people. A terminal or pipe that is gone must not end the supervisor with all of its children."""
        with contextlib.suppress(OSError):
            (self._screen or PlainScreen(sys.stderr)).note(text)


def explain(error: ChildFailed) -> str:
    """The end of the failed child's log, for people."""
    lines = "\n".join(f"  {line}" for line in error.tail)
    return f"--- {error.log}\n{lines}\n---"
