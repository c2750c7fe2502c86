"""The `pagewire` command: parses, calls, and turns errors into one line and an exit code."""

import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from services.cli.options import takes_scheduler_settings, takes_settings
from services.cli.settings import load_settings
from shared.errors import PagewireError

app = typer.Typer(
    help="Pagewire serves language models as three services joined by Redis Streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

P = ParamSpec("P")
R = TypeVar("R")

Config = Annotated[Path | None, typer.Option(help="TOML or YAML file with the same options; flags win.")]
Home = Annotated[Path | None, typer.Option(help="Model cache (PAGEWIRE_HOME).", show_default="~/.cache/pagewire")]
StateDirectory = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", help="State, logs, own Redis (PAGEWIRE_STATE).", show_default="~/.local/state/pagewire"
    ),
]
Verbose = Annotated[bool | None, typer.Option("--verbose", "-v", help="Show what the processes log.")]
Url = Annotated[str | None, typer.Option(help="Server.", show_default="the one that runs here")]
ApiKey = Annotated[str, typer.Option(envvar="PAGEWIRE_API_KEY", help="Sent as a bearer token.")]


CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def reports_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Expected errors become one line on stderr and exit code 1; so does output that nobody takes."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return function(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except PagewireError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            _give_up_stdout()
            if error.errno != errno.EPIPE:  # whoever read has seen enough
                print(f"error: cannot write: {error.strerror}", file=sys.stderr)
            raise typer.Exit(1) from error

    return wrapper


def _give_up_stdout() -> None:
    """What is left in its buffer goes nowhere, else Python tries again at exit and complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@app.command()
@reports_errors
@takes_settings
def up(config: Config = None, verbose: Verbose = None, **options: Any) -> None:
    """Serve a model: starts and supervises Redis, scheduler, workers and gateway."""
    settings = load_settings({**options, "verbose": verbose}, config)
    from services.cli.supervisor import ChildFailed
    from services.cli.up import explain
    from services.cli.up import up as run

    try:
        code = run(settings)
    except ChildFailed as error:
        print(explain(error), file=sys.stderr)
        raise
    raise typer.Exit(code)


@app.command()
@reports_errors
@takes_settings
def serve(
    service: Annotated[str, typer.Argument(help="gateway, scheduler or worker")],
    config: Config = None,
    name: Annotated[
        str | None,
        typer.Option(help="Stable name of this seat, unlike any other.", show_default="service, host and --index"),
    ] = None,
    index: Annotated[int, typer.Option(min=0, help="Place of a worker among --workers on this machine.")] = 0,
    **options: Any,
) -> None:
    """Run one service in the foreground. Without a Redis URL it joins the `pagewire up` that runs here."""
    settings = load_settings(options, config)
    from services.cli.serve import serve as run

    run(settings, service, name=name, index=index)


@app.command()
@reports_errors
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Pids per service and gateway addresses as JSON.")] = False,
    state_dir: StateDirectory = None,
) -> None:
    """List the processes of the `pagewire up` that runs here."""
    from services.cli.state_dir import StateDir

    directory = StateDir(load_settings({"state_dir": state_dir}).state_dir)
    pids, state = directory.live_pids(), directory.read()
    urls = dict(state.gateways) if state is not None and directory.is_locked() else {}
    if as_json:
        print(json.dumps({**pids, "gateway_urls": urls}))
        return
    for service, numbers in pids.items():
        print(f"{service:12}{' '.join(map(str, numbers)) or '-'}")
    for name, url in urls.items():
        print(f"{name:12}{url}")


@app.command()
@reports_errors
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all of a frame's data.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between frames.")] = 1.0,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis (REDIS_URL).", show_default="that of the `pagewire up` here")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Pool name.", show_default="that of the `pagewire up` here")] = None,
    state_dir: StateDirectory = None,
) -> None:
    """Watch a pool: queues and why requests wait, workers, their blocks, rates. Ctrl-C ends it."""
    from services.cli.redis_server import check_url
    from services.cli.serve import joined_pool
    from services.cli.top import show_live, show_once

    url, name = joined_pool(load_settings({"redis_url": redis_url, "pool": pool, "state_dir": state_dir}))
    check_url(url)
    if once or as_json:
        show_once(url, name, as_json=as_json)
    else:
        show_live(url, name, interval_s=interval)


@app.command()
@reports_errors
def pull(
    model: Annotated[
        str | None, typer.Argument(help=".gguf file or hub name.", show_default="smollm2-135m-instruct")
    ] = None,
    home: Home = None,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Also its GGUF file, for --quantization gguf, if an older pull kept none.")
    ] = False,
) -> None:
    """Fetch a model into the model cache and convert it, once; prints its folder."""
    settings = load_settings({"model": model, "home": home})
    import os

    from services.cli.models import ensure_model
    from services.cli.screen import open_screen
    from services.cli.signals import SignalInbox, StopRequested

    try:
        with SignalInbox() as inbox, open_screen() as screen:
            found = ensure_model(settings.model, settings.home, os.environ, inbox, screen, with_gguf=gguf)
    except StopRequested as error:
        raise typer.Exit(130) from error
    print(found.folder)


@app.command()
@reports_errors
def key(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in logs.")],
    tenant: Annotated[str | None, typer.Option(help="Its tenant.", show_default="the name")] = None,
) -> None:
    """Make an API key: the key on stderr, once; its block for --api-key-file on stdout."""
    from services.cli.keys import new_key

    made, block = new_key(name, tenant)
    print(f"key: {made}", file=sys.stderr)
    print(block)


@app.command()
@reports_errors
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this one question and end.")] = None,
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first that is served")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="1")] = None,
    api_key: ApiKey = "",
    state_dir: StateDirectory = None,
) -> None:
    """Talk to the served model in the terminal."""
    from services.cli.chat import Conversation, answer_once, converse
    from services.cli.http_api import first_model

    server = _server_url(url, state_dir)
    name = model or first_model(server, api_key)
    conversation = Conversation(server, name, system, max_tokens, temperature, api_key)
    if question is None:
        converse(conversation, sys.stdout)
    else:
        answer_once(conversation, question, sys.stdout)


def _readable(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_readable(part)}" for name, part in value.items()) or "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


@app.command()
@reports_errors
def bench(
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first that is served")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    prompt_words: Annotated[int, typer.Option(min=1, help="Random words per prompt.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Random token ids per prompt, instead of words.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Equal seeds send equal prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    api_key: ApiKey = "",
    state_dir: StateDirectory = None,
) -> None:
    """Load a server over HTTP and measure what its clients see. Exit code 1 if a request failed."""
    import asyncio

    from services.cli.bench import Load, run_load
    from services.cli.http_api import first_model

    server = _server_url(url, state_dir)
    load = Load(
        url=server,
        model=model or first_model(server, api_key),
        num_requests=requests,
        concurrency=concurrency,
        prompt_words=prompt_words,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seed=seed,
        api_key=api_key,
    )
    report = asdict(asyncio.run(run_load(load)))
    print(
        json.dumps(report) if as_json else "\n".join(f"{name:22}{_readable(value)}" for name, value in report.items())
    )
    raise typer.Exit(1 if report["errors"] else 0)


@app.command()
@reports_errors
@takes_scheduler_settings
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="poisson, chat, long_document, bursty or bimodal, with options as in chat:turns=8,think=2; "
            "a file of JSON lines; or a recording's folder."
        ),
    ] = "chat",
    config: Config = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests in all.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Arrivals per second.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Equal seeds give equal traces.", show_default="0")] = None,
    latency: Annotated[
        list[str] | None, typer.Option(help="Coefficient of the latency model, e.g. base_s=0.004; repeat for more.")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option(help="SECONDS:join|kill|drain:WORKER, e.g. 30:kill:worker-1; repeat for more.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Write pictures into this folder.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers.", show_default="1")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks per worker.", show_default="4096")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus output.", show_default="that of the trace")
    ] = None,
    **options: Any,
) -> None:
    """Run the scheduler's core under a load in virtual time, without model and Redis, and report."""
    sizes = {"workers": workers, "num_blocks": num_blocks, "max_model_len": max_model_len}
    settings = load_settings({**options, **sizes}, config)
    from services.cli.simulate import Load, run

    load = Load(
        trace=trace, requests=requests, rate=rate, seed=seed, latency=tuple(latency or ()), changes=tuple(change or ())
    )
    run(settings, load, as_json=as_json, plots=plots)


@app.command()
@reports_errors
def replay(
    folder: Annotated[Path, typer.Argument(help="Folder that `pagewire up --record` wrote.")],
    step: Annotated[
        str | None, typer.Option(help="Explain one step: the number of a tick, or WORKER/STEP as in worker-0/17.")
    ] = None,
    request: Annotated[str | None, typer.Option(help="Explain the life of the request with this id.")] = None,
) -> None:
    """Derive all recorded plans again. Exit code 0: byte-identical, and what is missing is told; 1: the first
    difference is shown."""
    from services.cli.replay import run

    raise typer.Exit(run(folder, step=step, request=request))


def _server_url(url: str | None, state_dir: Path | None) -> str:
    """The given server, else the one whose `pagewire up` runs on this machine, else the default address."""
    if url:
        return url.rstrip("/").removesuffix("/v1")
    from services.cli.state_dir import StateDir
    from services.cli.up import local_url

    settings = load_settings({"state_dir": state_dir})
    directory = StateDir(settings.state_dir)
    state = directory.read()
    if state is not None and directory.is_locked():
        return state.local_url
    return local_url(settings.host, settings.port)


if __name__ == "__main__":
    app()
