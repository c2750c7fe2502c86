"""Full blocks by what they hold: the tokens of the block, everything before it, and whose they are.

A block's key is a 128-bit hash of its tokens, keyed by the key of the block before it (as a prefix, which for BLAKE2
is as good as its key parameter and takes a third of the time); the chain starts at the domain (tenant, cache salt,
adapter), so nobody can be served from, or learn of, another domain's blocks. A hash alone decides
nothing: a hit also has the same tokens and *the same block before it*, known by a serial number that is never used
again, and in front of all the same domain. So the cache would be right with a hash of 8 bits.

    domain ──▶ key, serial 7 ──▶ key, serial 8 ──▶ key, serial 9        parent of 9 is 8, of 8 is 7, of 7 the domain

A block whose parent went is not found any more (the new entry for the parent has a new serial); it is replaced when its
content is cached again, and evicted otherwise.
"""

from collections.abc import Iterable, Iterator, KeysView, Sequence
from hashlib import blake2b
from struct import pack

import msgspec

Parent = int | bytes
"""Serial number of the block before; the domain in front of the first."""
KEY_SIZE = 16
_EMPTY = blake2b(digest_size=KEY_SIZE)
"""Copied for each key: to construct a hash takes longer than to compute it."""


def domain(*, tenant: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """Who may share blocks. Each part has a tag and its length, so no two different triples give the same bytes.

    `adapter` names weights beside the model's. No request can ask for any (the gateway refuses such fields), so the
    scheduler passes none; the part stands in every key all the same, so that adapters cannot come without being told
    apart. The model's own weights need no part: a pool serves one model, and a worker that loads anew is another
    incarnation, with an empty cache.
    """
    parts = ((b"t", tenant), (b"s", cache_salt), (b"a", adapter))
    return b"".join(
        tag + pack("<I", len(data)) + data for tag, data in ((tag, text.encode("utf-8")) for tag, text in parts)
    )


def root_key(domain: bytes) -> bytes:
    """The key in front of the first block."""
    return blake2b(domain, digest_size=KEY_SIZE).digest()


def block_key(before: bytes, tokens: bytes) -> bytes:
    """The key of a block that holds `tokens` (packed int32) behind the block with key `before`."""
    chained = _EMPTY.copy()
    chained.update(before + tokens)
    return chained.digest()


def chain_keys(before: bytes, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The keys of consecutive blocks."""
    for tokens in blocks:
        before = block_key(before, tokens)
        yield before


class CachedBlock(msgspec.Struct, eq=False, array_like=True, gc=False):
    """One entry of the cache."""

    block_id: int
    """Where it lies: a KV block, or if negative the host block `~block_id` (it is demoted)."""
    key: bytes
    parent: Parent
    serial: int
    tokens: bytes
    """Packed int32."""
    num_hits: int = 0
    entered: int = 0
    """When it was unreferenced for the first time; 0: not yet."""
    released: int = 0
    """When it was unreferenced last, or demoted since."""

    @property
    def is_demoted(self) -> bool:
        return self.block_id < 0

    @property
    def slot(self) -> int:
        """The host block of a demoted one."""
        return ~self.block_id

    def holds(self, parent: Parent, tokens: bytes) -> bool:
        return self.parent == parent and self.tokens == tokens


class PrefixCache:
    """Cached blocks of one worker, in KV cache and host pool, by key and by place (see `CachedBlock.block_id`)."""

    def __init__(self) -> None:
        self._by_block: dict[int, CachedBlock] = {}
        self._by_key: dict[bytes, CachedBlock] = {}
        self.last_serial = 0
        self._changed: dict[int, None] = {}

    def restore(self, entries: Iterable[CachedBlock], last_serial: int) -> None:
        """Continue as the cache did that gave out these entries."""
        self._by_block = {entry.block_id: entry for entry in entries}
        self._by_key = {entry.key: entry for entry in self._by_block.values()}
        self.last_serial = last_serial

    def __len__(self) -> int:
        return len(self._by_block)

    def __iter__(self) -> Iterator[CachedBlock]:
        """In an order that means nothing."""
        return iter(self._by_block.values())

    @property
    def keys(self) -> KeysView[bytes]:
        """Of all entries, as they are at any time."""
        return self._by_key.keys()

    def get(self, key: bytes) -> CachedBlock | None:
        """The entry with this key, whatever it holds."""
        return self._by_key.get(key)

    def at(self, block_id: int) -> CachedBlock | None:
        """The entry of a block."""
        return self._by_block.get(block_id)

    def add(self, block_id: int, key: bytes, parent: Parent, tokens: bytes) -> int:
        """A new entry, for a block and a key that have none; its serial number."""
        self.last_serial = serial = self.last_serial + 1
        self._by_block[block_id] = self._by_key[key] = CachedBlock(block_id, key, parent, serial, tokens)
        self._changed[block_id] = None
        return serial

    def remove(self, blocks: Iterable[int]) -> None:
        """Forget the entries of these blocks."""
        for block_id in blocks:
            del self._by_key[self._by_block.pop(block_id).key]
            self._changed[block_id] = None

    def move(self, entry: CachedBlock, block_id: int) -> None:
        """The same content lies in another block, which takes the entry over."""
        del self._by_block[entry.block_id]
        self._changed[entry.block_id] = self._changed[block_id] = None
        entry.block_id = block_id
        self._by_block[block_id] = entry

    def touch(self, blocks: Iterable[int]) -> None:
        """What the entries of these blocks say of their use has changed."""
        self._changed.update(dict.fromkeys(blocks))

    @property
    def num_changed(self) -> int:
        """Places that `take_changed` would answer."""
        return len(self._changed)

    def take_changed(self) -> Iterable[int]:
        """Places whose entries came, went or changed since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def current(self, entries: Sequence[CachedBlock]) -> Sequence[CachedBlock]:
        """The first of these that are entries still."""
        at = self._by_block.get
        for index, entry in enumerate(entries):
            if at(entry.block_id) is not entry:
                return entries[:index]
        return entries

    def match(self, keys: Iterable[bytes], parent: Parent, blocks: Iterable[bytes]) -> list[CachedBlock]:
        """The first entries, as far as they are cached, of consecutive blocks behind `parent`, by key and tokens."""
        found: list[CachedBlock] = []
        for key, tokens in zip(keys, blocks, strict=False):
            entry = self._by_key.get(key)
            if entry is None or entry.parent != parent or entry.tokens != tokens:
                break
            found.append(entry)
            parent = entry.serial
        return found
