"""Which blocks of the cache are free, in use, or kept for a context that begins alike.

Bookkeeping only; the blocks' contents are the cache's. A full block of committed tokens gets a
key that names every token up to its end, and the namespace: sequences that begin alike share it,
and it stays after its last user has gone until its room is needed. Sharing is exact: keys and
values of a token have the same bits whatever it was computed beside.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Key = bytes


def root_key(namespace: str) -> Key:
    """Key of the empty context: what other namespaces' keys never begin with."""
    return hashlib.blake2b(namespace.encode(), digest_size=32, person=b"vs-kv-root").digest()


def next_key(key: Key, token_ids: Sequence[int]) -> Key:
    """Key of a context one block longer than that of `key`."""
    content = key + np.asarray(token_ids, "<i8").tobytes()
    return hashlib.blake2b(content, digest_size=32, person=b"vs-kv-block").digest()


class BlockPool:
    """Hands out blocks 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users: dict[int, int] = {}
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Kept blocks without a user, longest unused first."""

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now; kept ones without a user are given up for it."""
        return len(self._free) + len(self._idle)

    @property
    def num_kept(self) -> int:
        """Blocks kept under a key, in use or not."""
        return len(self._key_of)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of one user; raises RuntimeError when there are not so many."""
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks wanted, {self.num_available} available")
        blocks = []
        for _ in range(count):
            if not self._free:
                oldest, _ = self._idle.popitem(last=False)
                del self._block_of[self._key_of.pop(oldest)]
                self._free.append(oldest)
            block = self._free.pop()
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def share(self, keys: Sequence[Key]) -> list[int]:
        """The kept blocks for the longest beginning of `keys`, each with one user more."""
        blocks = self.find(keys)
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] = self.num_users(block) + 1
        return blocks

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks `share` would return."""
        found = itertools.takewhile(lambda b: b is not None, map(self._block_of.get, keys))
        return [block for block in found if block is not None]

    def num_users(self, block: int) -> int:
        return self._users.get(block, 0)

    def keep(self, block: int, key: Key) -> None:
        """Offer a full block that is in use for sharing; the first of equal ones is kept."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Take one user from each block; what nobody uses is free, or kept until needed."""
        # From the end: the beginning of a context is worth more than what follows it.
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)
