"""Health check of a container without a port: exit code 0 if the named process holds a lease and is ready.

lease_check.py SERVICE NAME, with the service's own PAGEWIRE_REDIS_URL and PAGEWIRE_POOL in the environment. A standby
counts as ready. Redis away means not healthy: the process cannot serve then.
"""

import os
import sys

from shared.keys import Keys
from shared.leases import read_members
from shared.messages import WorkerState
from shared.redis_client import connect


def is_ready(service: str, name: str) -> bool:
    client = connect(os.environ["PAGEWIRE_REDIS_URL"])
    keys = Keys(os.environ.get("PAGEWIRE_POOL", "default"))
    wanted = (service, name, WorkerState.READY)
    leases = [lease for lease in read_members(client, keys).values() if lease is not None]
    return wanted in [(lease.service, lease.name, lease.state) for lease in leases]


if __name__ == "__main__":
    sys.exit(not is_ready(sys.argv[1], sys.argv[2]))
