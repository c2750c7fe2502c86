"""`python -m services.scheduler`: reads the settings, composes the service, runs it until SIGTERM.

A second SIGTERM ends it at once.
"""

import os
import signal
import sys
import threading

from pydantic import ValidationError

from services.scheduler.service import logs
from services.scheduler.service.service import SchedulerService
from services.scheduler.settings import Settings
from shared import fault_points
from shared.errors import ConfigError
from shared.keys import Keys
from shared.leases import LeaseKeeper, new_instance
from shared.messages import Lease, WorkerState
from shared.start_up import freeze_objects


def main() -> int:
    """Exit status: 0 after SIGTERM, 2 for a bad setting."""
    try:
        settings = Settings()
        keys = Keys(settings.pool)
    except (ValidationError, ConfigError) as error:
        print(f"pagewire scheduler: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    logs.configure(settings.log_level)
    fault_points.arm(settings.fault_dir)
    lease = Lease(
        service="scheduler",
        name=settings.name,
        instance=settings.instance or new_instance(),
        pid=os.getpid(),
        state=WorkerState.LOADING,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0) if stop.is_set() else stop.set())
    try:
        service = SchedulerService(settings, lease)
    except ConfigError as error:
        print(f"pagewire scheduler: {error}", file=sys.stderr)
        return 2
    logs.info("start_up_frozen", num_objects=freeze_objects())
    keeper = LeaseKeeper(settings.redis_url, keys, lease, ttl_s=settings.lease_ttl_s).start()
    try:
        service.run(stop, lambda ready: keeper.update(state=WorkerState.READY if ready else WorkerState.LOADING))
    finally:
        service.close()
        keeper.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
