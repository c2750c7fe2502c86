"""Making an API key: the key is shown once, its digest goes into the key file."""

import secrets
from hashlib import sha256

from services.gateway.access import KeyEntry
from shared.errors import ConfigError

PREFIX = "pw-"
"""So that a key that was leaked is found as one."""


def new_key(name: str, tenant: str | None) -> tuple[str, str]:
    """(key, the block for the key file).

    Raises:
        ConfigError: name or tenant is none.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    digest = sha256(key.encode()).hexdigest()
    try:
        KeyEntry(name=name, sha256=digest, tenant=tenant)
    except ValueError as error:
        raise ConfigError("name: letters, digits, dot, dash, underscore; tenant: printable, no spaces") from error
    lines = ["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"']
    return key, "\n".join([*lines, *([f"tenant = {_quoted(tenant)}"] if tenant is not None else [])])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
