"""`python -m services.gpu_worker`: one worker process, told everything by `PAGEWIRE_…` variables (see settings.py)."""

import logging
import os
import sys
from functools import partial

from pydantic import ValidationError

from services.gpu_worker.service.lifecycle import ExitCode, run_process
from services.gpu_worker.service.partition import (
    Partition,
    apply_partition,
    plan_partition,
    thread_environment,
)
from services.gpu_worker.service.worker import LoadedWorker, LoadProgress, Worker
from services.gpu_worker.settings import Settings
from shared import fault_points
from shared.errors import ConfigError
from shared.keys import Keys
from shared.leases import new_instance
from shared.model_store import resolve
from shared.start_up import freeze_objects

SWITCH_INTERVAL_S = 0.001
"""With Python's default of 5 ms a computing thread can hold up a publishing one for as long as a small step takes."""

log = logging.getLogger("services.gpu_worker")


def main() -> int:
    """Run one worker; answers the exit code."""
    try:
        settings = Settings()
        keys = Keys(settings.pool)
    except (ValidationError, ConfigError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.CONFIG
    _configure_logging(settings.log_level)
    fault_points.arm(settings.fault_dir)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    partition = plan_partition(settings.worker_index, settings.num_workers)
    _prepare_cores(partition)
    instance = settings.instance or new_instance()
    worker = Worker(
        settings.redis_url, keys, name=settings.name, instance=instance, drain_grace_s=settings.drain_grace_s
    )
    load = partial(_load, settings, partition)
    return run_process(worker, load, drain_grace_s=settings.drain_grace_s, niceness=settings.compute_niceness)


def _load(settings: Settings, partition: Partition, report: LoadProgress) -> LoadedWorker:
    resolved = resolve(settings.model, settings.home)
    resolved.require_folder()
    # imports torch: in the compute thread, once the lease says that the worker is loading
    from services.gpu_worker.service.loading import load_worker

    loaded = load_worker(settings, resolved, partition, report)
    log.info("%d objects frozen", freeze_objects())
    return loaded


def _prepare_cores(partition: Partition) -> None:
    """Before torch is imported: its thread pools read affinity and environment when they start."""
    apply_partition(partition)
    for name, value in thread_environment(partition).items():
        os.environ.setdefault(name, value)


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


if __name__ == "__main__":
    sys.exit(main())
