"""API keys: who may call, as which tenant, and how much.

A key is a long random text, so its SHA-256 stands in the file instead of the key itself; a slow hash would protect
only a text that could be guessed. A file of TOML:

    [[keys]]
    name = "alice"              # in logs and answers; unique
    sha256 = "9f86d0…"          # `pagewire key alice` makes a key and this block
    tenant = "acme"             # default: the name
    max_concurrent = 8          # HTTP requests at a time; default: no limit
    tokens_per_minute = 60000   # prompt and output; default: no limit
"""

import hmac
import re
import socket
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigError
from shared.scripts.quotas import Quota

MIN_KEY = 8
"""Characters of a key given in the open."""
MAX_NAME = 64


class KeyEntry(BaseModel):
    """One key of the file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = Field(pattern=rf"^[A-Za-z0-9._-]{{1,{MAX_NAME}}}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str | None = Field(None, pattern=r"^[\x21-\x7e]{0,128}$")
    max_concurrent: int = Field(0, ge=0, le=10_000)
    tokens_per_minute: int = Field(0, ge=0, le=10**12)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `tenant` None: whatever a trusted proxy says."""

    name: str = ""
    tenant: str | None = None
    quota: Quota | None = None


class KeyRing:
    """The keys of one gateway."""

    def __init__(self, entries: Sequence[tuple[bytes, Caller]]) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> Caller | None:
        """The caller with this key. Takes equally long for every key, right or wrong."""
        digest, found = sha256(key.encode("utf-8", "surrogateescape")).digest(), None
        for expected, caller in self._entries:
            if hmac.compare_digest(digest, expected):
                found = caller
        return found


def load_keys(api_key: str, file: Path | None) -> KeyRing:
    """The key given in the open, if any (the default tenant's), and those of the file.

    Raises:
        ConfigError: a key is too short, or the file is not what it should be; never shows a key.
    """
    entries: list[tuple[bytes, Caller]] = []
    if api_key:
        if len(api_key) < MIN_KEY or not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise ConfigError(f"api-key: at least {MIN_KEY} printable ASCII characters without spaces")
        entries.append((sha256(api_key.encode()).digest(), Caller("default")))
    for entry in _read(file.expanduser()) if file is not None else ():
        quota = Quota(entry.name, entry.max_concurrent, entry.tokens_per_minute / 60)
        tenant = entry.name if entry.tenant is None else entry.tenant
        entries.append((bytes.fromhex(entry.sha256), Caller(entry.name, tenant, quota if quota.is_limited else None)))
    return KeyRing(entries)


def _read(file: Path) -> list[KeyEntry]:
    try:
        values = tomllib.loads(file.read_text())
        entries = [KeyEntry.model_validate(value) for value in values.pop("keys")]
    except OSError as error:
        raise ConfigError(f"key file {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"key file {file}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"key file {file}: tables [[keys]] are expected") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ConfigError(f"key file {file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if values:
        raise ConfigError(f"key file {file}: unknown {sorted(values)[0]!r}")
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names) or len({entry.sha256 for entry in entries}) < len(entries):
        raise ConfigError(f"key file {file}: every name and every key once")
    return entries


def check_callers(keys: KeyRing, host: str, *, insecure: bool) -> None:
    """
    Raises:
        ConfigError: whoever reaches `host` could call, and nobody said that this is meant.
    """
    if not len(keys) and not insecure and not is_loopback(host):
        raise ConfigError(f"host {host} can be reached by others: give --api-key or --api-key-file, or --insecure")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there. A name that is not known now is not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return bool(found) and all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
