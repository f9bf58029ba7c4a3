"""Small documents that change rarely, and the atomic steps needed to publish them safely.

The contract, and an implementation in memory. `retrieval.redis_documents` is the other one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

MAX_DOCUMENT_BYTES = 4 * 2**20

Swapped = Literal["done", "changed", "fenced"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on something alone, for a while.

    A holder that was paused cannot know that its time is over. So every lease has a fencing token,
    greater than that of any lease of this name before it, and what the holder writes is refused
    once a later lease was granted.
    """

    name: str
    token: int


class Documents(Protocol):
    """Every method may raise StoreError and nothing else. Times are durations, never dates.

    An empty value is as good as none.
    """

    async def read(self, key: str) -> bytes | None:
        """The value, MAX_DOCUMENT_BYTES + 1 bytes of it at most; None where there is none."""
        ...

    async def create(self, key: str, value: bytes) -> bool:
        """Write a value that is never written again; False, and nothing done, if there is one."""
        ...

    async def swap(
        self, key: str, old: bytes | None, new: bytes, fence: Lease | None = None
    ) -> Swapped:
        """Replace `old` (None: nothing) by `new`, in one step.

        "changed": the value is not `old`. "fenced": a lease later than `fence` was granted.
        """
        ...

    async def delete(self, key: str) -> None:
        """Delete a value or a set of names, if there is one."""
        ...

    async def add_members(self, key: str, *members: str) -> None:
        """Add to a set of names; a name that is in it already is ignored."""
        ...

    async def remove_members(self, key: str, *members: str) -> None:
        """Remove from a set of names; a name that is not in it is ignored."""
        ...

    async def members(self, key: str) -> set[str]: ...

    async def acquire(self, name: str, ttl_s: float) -> Lease | None:
        """Take the lease of this name for ttl_s seconds; None while somebody holds it."""
        ...

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """Hold it for ttl_s seconds from now on; False if it has lapsed."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give it back; a lapsed one is ignored."""
        ...

    async def aclose(self) -> None: ...


class InMemoryDocuments:
    """Dictionaries. For tests and simulations: all that share one object share the documents."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, bytes] = {}
        self._sets: defaultdict[str, set[str]] = defaultdict(set)
        self._tokens: defaultdict[str, int] = defaultdict(int)
        self._held: dict[str, tuple[Lease, float]] = {}  # name -> (lease, expiry)

    async def read(self, key: str) -> bytes | None:
        return self._values.get(key, b"")[: MAX_DOCUMENT_BYTES + 1] or None

    async def create(self, key: str, value: bytes) -> bool:
        if key in self._values:
            return False
        self._values[key] = value
        return True

    async def swap(
        self, key: str, old: bytes | None, new: bytes, fence: Lease | None = None
    ) -> Swapped:
        if fence is not None and self._tokens[fence.name] != fence.token:
            return "fenced"
        if self._values.get(key, b"") != (old or b""):
            return "changed"
        self._values[key] = new
        return "done"

    async def delete(self, key: str) -> None:
        self._values.pop(key, None)
        self._sets.pop(key, None)

    async def add_members(self, key: str, *members: str) -> None:
        self._sets[key].update(members)

    async def remove_members(self, key: str, *members: str) -> None:
        self._sets[key].difference_update(members)

    async def members(self, key: str) -> set[str]:
        return set(self._sets[key])

    async def acquire(self, name: str, ttl_s: float) -> Lease | None:
        if self._holder(name) is not None:
            return None
        self._tokens[name] += 1
        lease = Lease(name, self._tokens[name])
        self._held[name] = (lease, self._clock() + ttl_s)
        return lease

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        if self._holder(lease.name) != lease:
            return False
        self._held[lease.name] = (lease, self._clock() + ttl_s)
        return True

    async def release(self, lease: Lease) -> None:
        if self._holder(lease.name) == lease:
            del self._held[lease.name]

    async def aclose(self) -> None:
        return None

    def _holder(self, name: str) -> Lease | None:
        lease, expiry = self._held.get(name, (None, 0.0))
        return lease if expiry > self._clock() else None
