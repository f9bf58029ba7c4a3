"""Which blocks of the cache are free, in use, or kept for a context that begins alike.

Bookkeeping only; the blocks' contents are the cache's. A full block of committed tokens gets a
key that names every token up to its end, and the namespace: sequences that begin alike share it,
and it stays after its last user has gone until its room is needed. Where contexts part within a
block, or end in one, what they have in common can be copied from it. Both are exact: keys and
values of a token have the same bits whatever it was computed beside.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from valuspec.engine.kv_cache import Int64Array

Key = bytes

#: Kept blocks that are compared, latest first, where many contexts go on differently.
MOST_COMPARED = 64


def root_key(namespace: str) -> Key:
    """Key of the empty context: what other namespaces' keys never begin with."""
    return hashlib.blake2b(namespace.encode(), digest_size=32, person=b"vs-kv-root").digest()


def next_key(key: Key, token_ids: Sequence[int] | Int64Array) -> Key:
    """Key of the context that goes on behind that of `key` with `token_ids`, a block at most."""
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
        self._behind: dict[Key, dict[int, Int64Array]] = {}
        """Kept blocks by the key of what comes before them, latest last; and their tokens."""
        self._before: dict[int, Key] = {}
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
                self._give_up(oldest)
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

    def keep(self, block: int, before: Key, token_ids: Int64Array) -> None:
        """Keep a block in use for contexts that go on as it does: behind the context of key
        `before` with `token_ids`, all of its tokens that count. The first of equal ones is kept."""
        key = next_key(before, token_ids)
        if key in self._block_of or block in self._key_of:
            return
        self._block_of[key] = block
        self._key_of[block] = key
        self._before[block] = before
        self._behind.setdefault(before, {})[block] = token_ids

    def continuation(self, before: Key, token_ids: Int64Array) -> tuple[int, int]:
        """(block, count): of the blocks kept behind `before`, one with the most leading tokens in
        common with `token_ids`, and how many. (-1, 0) where there is none."""
        best, most = -1, 0
        behind = self._behind.get(before, {})
        for block in itertools.islice(reversed(behind), MOST_COMPARED):
            length = min(len(behind[block]), len(token_ids))
            same = np.append(behind[block][:length] == token_ids[:length], False)
            if (count := int(same.argmin())) > most:
                best, most = block, count
        return best, most

    def _give_up(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        before = self._before.pop(block)
        del self._behind[before][block]
        if not self._behind[before]:
            del self._behind[before]

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
