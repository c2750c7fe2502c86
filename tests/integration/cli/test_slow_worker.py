"""A worker that computes without its kernels is much slower: `pagewire up` says so where its address is told."""

import io
import os
from pathlib import Path

import msgspec

from services.cli.screen import PlainScreen
from services.cli.settings import load_settings
from services.cli.signals import SignalInbox
from services.cli.state_dir import StateDir
from services.cli.up import Stack
from shared.keys import Keys
from shared.leases import LeaseKeeper, new_instance
from shared.messages import Lease, WorkerState


def test_up_tells_what_its_workers_warn_of(redis_url: str, keys: Keys, tmp_path: Path) -> None:
    leases = [
        Lease("gpu_worker", f"worker-{index}", new_instance(), 0, WorkerState.READY, warning=warning)
        for index, warning in enumerate(("", "no C++ kernels for this machine"))
    ]
    keepers = [LeaseKeeper(redis_url, keys, lease).start() for lease in leases]
    told = io.StringIO()
    try:
        with SignalInbox() as inbox:
            stack = Stack(load_settings({}), keys, StateDir(tmp_path), inbox, 0, dict(os.environ))
            stack._run_state = msgspec.structs.replace(stack._run_state, gateways={})
            stack._await_ready(redis_url, [(lease.name, lease.instance) for lease in leases], PlainScreen(told))
            stack._closing.close()
    finally:
        for keeper in keepers:
            keeper.stop()
    warnings = [line for line in told.getvalue().splitlines() if "warning" in line]
    assert warnings == ["warning: worker-1: no C++ kernels for this machine"]
