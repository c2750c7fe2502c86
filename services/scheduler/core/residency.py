"""What of a request lies in a lane's blocks already, and what its table leaves for others.

Keys are computed when they are first needed and stay with the request. Every token here is committed; so is the KV of
every block that `keep` is told of: the plans that wrote it are answered.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.prefix_cache import CachedBlock, chain_keys, domain, root_key
from services.scheduler.core.request import Request

if TYPE_CHECKING:
    from services.scheduler.core.seats import Seat

STRIDE = 8
"""Blocks that are looked for at first; as long as all are found, as many again."""


def domain_of(request: Request) -> bytes:
    """The domain of the request's blocks."""
    if not request.domain:
        submission = request.submission
        request.domain = domain(tenant=submission.tenant, cache_salt=submission.cache_salt)
    return request.domain


def first_key(request: Request, block_size: int) -> bytes | None:
    """The key of a request's first block, if that can be a hit at all."""
    most = (request.num_tokens - 1) // block_size
    if most and not request.block_keys:
        _chain(request, _blocks(request, 0, min(most, STRIDE), block_size))
    return request.block_keys[0] if most else None


def match(request: Request, pool: BlockPool, block_size: int) -> list[CachedBlock]:
    """The longest cached prefix of a request. Its last token is always left to compute. A miss costs one look-up."""
    most = (request.num_tokens - 1) // block_size
    if first_key(request, block_size) not in pool.cache.keys:
        return []
    found: list[CachedBlock] = []
    start, parent = 0, domain_of(request)
    while start < most:
        stop = min(most, max(2 * start, STRIDE))
        blocks = _blocks(request, start, stop, block_size)
        _chain(request, blocks[len(request.block_keys) - start :])
        found += pool.cache.match(request.block_keys[start:stop], found[-1].serial if found else parent, blocks)
        if len(found) < stop:
            break
        start = stop
    return found


def keep(seat: "Seat", pool: BlockPool, num_tokens: int, block_size: int) -> None:
    """Cache the full blocks of the seat's first `num_tokens` tokens, which the request's `output` holds."""
    start, stop = seat.num_kept, num_tokens // block_size
    if start >= stop:
        return
    request = seat.request
    parent = seat.parent if start else domain_of(request)
    tokens = _blocks(request, start, stop, block_size)
    num_known = len(request.block_keys)
    if num_known < start:
        _chain(request, _blocks(request, num_known, start, block_size))
    _chain(request, tokens[len(request.block_keys) - start :])
    seat.parent = pool.keep(seat.blocks[start:stop], request.block_keys[start:stop], parent, tokens)
    seat.num_kept = stop


def _chain(request: Request, blocks: Iterable[bytes]) -> None:
    """Append the keys of the blocks that follow those with keys."""
    keys = request.block_keys
    keys.extend(chain_keys(keys[-1] if keys else root_key(domain_of(request)), blocks))


def _blocks(request: Request, start: int, stop: int, block_size: int) -> list[bytes]:
    """The tokens of the blocks `start … stop - 1`."""
    size = 4 * block_size
    tokens = request.tokens_between(start * block_size, stop * block_size)
    return [tokens[offset : offset + size] for offset in range(0, len(tokens), size)]
