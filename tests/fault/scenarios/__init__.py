"""Scenarios by name. Each takes a `FaultRun`, starts what it needs, and adds tables and bars to its report.

Those that measure times come first: whoever runs them all knows when the machine must be left alone.
"""

from collections.abc import Callable

from tests.fault.scenarios import crowds, kills, network, overload, pauses, recoveries, redis_faults
from tests.harness.fault_run import FaultRun

SCENARIOS: dict[str, Callable[[FaultRun], None]] = {
    "worker-kill": recoveries.worker_kill,
    "worker-lease": recoveries.worker_lease,
    "scheduler-kill": recoveries.scheduler_kill,
    "gateway-resume": recoveries.gateway_resume,
    "overload": overload.overload,
    "health": overload.health,
    "redis-restart": redis_faults.redis_restart,
    "redis-truncated": redis_faults.redis_truncated,
    "redis-flushall": redis_faults.redis_flushall,
    "random-kills": kills.random_kills,
    "windows": kills.windows,
    "drains": kills.drains,
    "stops": kills.stops,
    "sampling": kills.sampling,
    "worker-pause": pauses.worker_pause,
    "leader-pause": pauses.leader_pause,
    "network": network.network,
    "redis-away": network.redis_away,
    "client-resets": network.client_resets,
    "clients-leave": crowds.clients_leave,
    "soak": crowds.soak,
}
