"""Memory that a step frees is memory that the next step needs."""

import ctypes
import logging

log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_LIMIT = 1 << 30


def keep_freed_memory() -> None:
    """Tell glibc not to give freed tensors back to the kernel, which would clear their pages again for every step.

    Measured on 512 tokens of the default model: an RMSNorm takes 0.26 ms instead of 0.9 ms, a rotary embedding 0.5 ms
    instead of 1.9 ms. The process keeps the memory of its largest step. Without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        log.info("no mallopt: freed memory goes back to the system")
        return
    mallopt(_TRIM_THRESHOLD, _LIMIT)
    mallopt(_MMAP_THRESHOLD, _LIMIT)
