"""Memory for weights that every step reads from end to end."""

import mmap

import torch

_HUGE_PAGE = 2 << 20


def allocate(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, aligned to a huge page and on huge pages where the system gives them, so that a read at full
    bandwidth does not wait for address translation. Cleared."""
    # Private: shared memory, which is what mmap gives by default, has no huge pages on most systems.
    area = mmap.mmap(-1, max(1, num_bytes) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE
    return whole[offset : offset + num_bytes]
