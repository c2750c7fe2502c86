"""What the parts of a snapshot have in common."""

import msgspec

from shared.errors import PagewireError


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A part of a snapshot."""


class UnusableSnapshot(PagewireError):
    """Other format, other configuration, or something is missing: the scheduler must start cold."""
