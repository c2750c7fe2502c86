"""What a Redis keeps, told by its own `INFO`: the log is as lasting as that."""

from collections.abc import Mapping
from typing import Any, Literal

Durability = Literal["everysec", "always", "none"]
"""How Redis writes its append-only file: once a second, before every answer, or not at all."""

MEANING: Mapping[Durability, str] = {
    "always": "a crash loses nothing that was answered",
    "everysec": "a crash loses at most the last second",
    "none": "a restart of Redis loses every request",
}


def objections(info: Mapping[str, Any]) -> list[str]:
    """What is wrong with this Redis, for people. `info`: the sections `memory` and `persistence`."""
    found = []
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        found.append(f"Redis evicts keys (maxmemory-policy {policy}): set noeviction, or requests may be lost")
    if not info.get("aof_enabled", 1):
        found.append(f"Redis has no append-only file (durability none): {MEANING['none']}")
    elif info.get("aof_last_write_status", "ok") != "ok":
        found.append("Redis cannot write its append-only file: nothing is accepted until it can")
    return found


def durability_of(info: Mapping[str, Any], appendfsync: str | None) -> Durability | None:
    """What is in force; None if nobody knows: `appendfsync` could not be read, or leaves it to the system."""
    if not info.get("aof_enabled", 0):
        return "none"
    known: Mapping[str | None, Durability] = {"always": "always", "everysec": "everysec"}
    return known.get(appendfsync)
