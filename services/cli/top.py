"""`pagewire top`: queues, workers and their blocks, live in the terminal or as one frame."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.pool_frame import PoolFrame, PoolUnreachable, read_frame
from shared.keys import Keys
from shared.messages import Lease, PoolStats, RequestOverview, WorkerOverview, WorkerState
from shared.redis_client import connect

PLAIN_WIDTH = 140
"""Of a frame that goes into a pipe."""
ROWS_IN_ALL = 24
"""Requests that a frame shows, where the terminal does not say how many fit."""
LINES_BESIDE_REQUESTS = 16
_BLOCK_STYLES = {"#": "green", "+": "yellow", ".": "bright_black"}


def show_once(url: str, pool: str, *, as_json: bool) -> None:
    """Print one frame.

    Raises:
        PoolUnreachable: Redis does not answer.
    """
    client, keys = connect(url), Keys(pool)
    try:
        frame = read_frame(client, keys)
    finally:
        client.close()
    if as_json:
        print(frame.as_json().decode())
    else:
        console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
        console.print(render(frame, ROWS_IN_ALL))


def show_stream(url: str, pool: str, *, interval_s: float) -> None:
    """Frame after frame into a file or pipe, until Ctrl-C. When nobody reads any more, `Console` ends the process."""
    client, keys, console = connect(url), Keys(pool), Console(width=PLAIN_WIDTH)
    try:
        while True:
            try:
                console.print(render(read_frame(client, keys), ROWS_IN_ALL), end="\n\n")
            except PoolUnreachable as error:
                console.print(Text(str(error)), end="\n\n")
            time.sleep(interval_s)
    except KeyboardInterrupt:
        pass
    finally:
        client.close()


def show_live(url: str, pool: str, *, interval_s: float) -> None:
    """Follow the pool until Ctrl-C. While Redis is away the last frame stays, with a note."""
    if not sys.stdout.isatty():
        show_stream(url, pool, interval_s=interval_s)
        return
    client, keys, console = connect(url), Keys(pool), Console()
    note = ""
    frame = PoolFrame(pool)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                try:
                    frame, note = read_frame(client, keys), ""
                except PoolUnreachable as error:
                    note = str(error)
                num_rows = max(2, console.height - LINES_BESIDE_REQUESTS - len(frame.members))
                live.update(Group(Text(note, style="red"), render(frame, num_rows)), refresh=True)
                time.sleep(interval_s)
        except KeyboardInterrupt:
            pass
        finally:
            client.close()


# ---------------------------------------------------------------- one frame


def render(frame: PoolFrame, num_rows: int) -> RenderableType:
    """The whole frame; `num_rows` requests at most, half of them waiting ones if there are so many."""
    parts: list[RenderableType] = [Text.assemble(*_heading(frame))]
    if frame.stats is not None:
        parts.append(Text("\n".join(_figures(frame, frame.stats))))
    parts.append(_workers(frame))
    overview = frame.overview
    if overview is not None:
        num_waiting = min(len(overview.waiting), max(num_rows // 2, num_rows - len(overview.running)))
        parts.append(_requests("running", overview.running[: num_rows - num_waiting]))
        if overview.swapped:
            parts.append(_requests("swapped", overview.swapped[: max(1, num_rows // 4)]))
        parts.append(_requests("waiting", overview.waiting[:num_waiting]))
    return Group(*parts)


def _heading(frame: PoolFrame) -> Iterator[str | tuple[str, str]]:
    yield ("pagewire", "bold")
    yield f"  pool {frame.pool}  "
    if frame.leader is None:
        yield ("no scheduler leads", "red")
    else:
        tick = f" tick {frame.stats.tick}" if frame.stats is not None else ""
        epoch = f" epoch {frame.stats.epoch}" if frame.stats is not None else ""
        yield f"leader {frame.leader.name}{epoch}{tick}"
    others = [f"{lease.name} {lease.state}" for lease in frame.members if lease.service != "gpu_worker"]
    yield f"  {'  '.join(others)}"


def _figures(frame: PoolFrame, stats: PoolStats) -> Iterator[str]:
    reasons = ", ".join(f"{reason} {count}" for reason, count in stats.waiting_by_reason)
    oldest = f", oldest {stats.oldest_wait_s:.1f} s" if stats.num_requests_waiting else ""
    yield (
        f"requests  running {stats.num_requests_running}  waiting {stats.num_requests_waiting}"
        f"{f' ({reasons}{oldest})' if reasons else ''}  swapped {stats.num_requests_swapped}"
    )
    generated, prefilled = frame.tokens_per_s
    yield f"tokens/s  generated {generated:.1f}  prefilled {prefilled:.1f}  prefix hits {_percent(frame.hit_rate)}"
    used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    share = used / stats.num_blocks if stats.num_blocks else None
    yield (
        f"blocks    used {used} ({_percent(share)})  cached {stats.num_cached_blocks}  free {stats.num_free_blocks}"
        f"  host used {stats.num_cpu_blocks - stats.num_free_cpu_blocks - stats.num_cached_cpu_blocks}"
        f" cached {stats.num_cached_cpu_blocks} of {stats.num_cpu_blocks}"
    )
    yield (
        f"so far    preempted {stats.num_preemptions}  handed over {stats.num_handovers}  requeued {stats.num_requeues}"
        f"  swapped out {stats.num_swap_outs} in {stats.num_swap_ins}  demoted {stats.num_demotions}"
        f"  promoted {stats.num_promotions}  forks {stats.num_forks}"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _workers(frame: PoolFrame) -> Table:
    columns = ("worker", "state", "rows", "prefill", "plans", "used", "cached", "free", "tok/s", "prefill/s")
    table = _table(*columns, numbers=columns[2:])
    table.add_column("blocks", overflow="fold")
    told = {worker.worker: worker for worker in (frame.overview.workers if frame.overview is not None else ())}
    leases = {lease.name: lease for lease in frame.members if lease.service == "gpu_worker"}
    for name in sorted({*told, *leases}):
        table.add_row(*_worker(name, leases.get(name), told.get(name)))
    return table


def _worker(name: str, lease: Lease | None, worker: WorkerOverview | None) -> Iterable[str | Text]:
    state = _state(lease, worker)
    if worker is None:
        return (name, state)
    used = worker.num_blocks - worker.num_free_blocks - worker.num_cached_blocks
    return (
        name,
        state,
        f"{worker.num_running}/{worker.max_running}",
        str(worker.num_prefilling),
        str(worker.num_plans_in_flight),
        str(used),
        str(worker.num_cached_blocks),
        str(worker.num_free_blocks),
        f"{worker.generated_tokens_per_s:.1f}",
        f"{worker.prefilled_tokens_per_s:.1f}",
        Text.assemble(*((sign, _BLOCK_STYLES.get(sign, "")) for sign in worker.block_map)),
    )


def _state(lease: Lease | None, worker: WorkerOverview | None) -> str:
    if lease is None:
        return "silent"
    if lease.state is WorkerState.LOADING:
        return f"loading {lease.progress:.0%}"
    return str(lease.state) if worker is not None or lease.state is not WorkerState.READY else "joining"


def _requests(title: str, requests: Sequence[RequestOverview]) -> Table:
    columns = ("id", "age s", "prompt", "output", "preempted", "worker" if title == "running" else "why")
    table = _table(f"{title}: {columns[0]}", *columns[1:], numbers=columns[1:5])
    for request in requests:
        where = f"{request.reason}: {request.detail}" if request.reason else f"{request.worker} row {request.row}"
        table.add_row(
            Text(request.request_id),  # a plain string would be read as markup
            f"{request.age_s:.1f}",
            str(request.num_prompt_tokens),
            str(request.num_output_tokens),
            str(request.num_preemptions),
            Text(where),
        )
    return table


def _table(*columns: str, numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return table
