"""The documentation of metrics, from the metrics themselves."""

from prometheus_client.core import Metric

from services.gateway.health import PoolView
from services.gateway.metrics import Metrics
from shared.histogram import QUEUE_TIME_BOUNDS_S, STEP_TIME_BOUNDS_S
from shared.messages import Lease, PoolStats, QueueTimes, StepTimes, WorkerState


def metrics_table() -> str:
    """A Markdown table: one line per metric."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    families = sorted(_example().registry.collect(), key=lambda family: family.name)
    return "\n".join([*lines, *map(_line, families)]) + "\n"


def _example() -> Metrics:
    """Metrics in which every label has a value."""
    times = QueueTimes("normal", (0,) * (len(QUEUE_TIME_BOUNDS_S) + 1), 0.0)
    reasons, refused = (("rows", 0),), (("worker-0", 0),)
    stats = PoolStats(
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, waiting_by_reason=reasons, queue_times=(times,), refused_writes=refused
    )
    step = StepTimes("step", (0,) * (len(STEP_TIME_BOUNDS_S) + 1), 0.0)
    worker = Lease("gpu_worker", "worker-0", "", 0, WorkerState.READY, step_times=(step,))
    metrics = Metrics("", "", lambda: PoolView(0.0, workers=(worker,), stats=stats), live=int, tasks=int)
    metrics.finished("")
    metrics.aborted("")
    metrics.detached("")
    metrics.failed("")
    return metrics


def _line(family: Metric) -> str:
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
    name = family.name + ("_total" if family.type == "counter" else "")
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"
