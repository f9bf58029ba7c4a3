"""Blobs under (namespace, tree id): the contract, and an implementation in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from retrieval.codec import MAX_BLOB_BYTES
from valuspec.errors import ValuSpecError

StoreErrorKind = Literal[
    "timeout", "unreachable", "busy", "full", "readonly", "auth", "loading", "moved", "protocol"
]
DEFAULT_TTL_S = 7 * 24 * 3600


class StoreError(ValuSpecError):
    """The store did not do what was asked; `kind` is one of StoreErrorKind, for counters."""

    def __init__(self, kind: StoreErrorKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind: StoreErrorKind = kind


def refusal(error: StoreError) -> str:
    """What an operator has to know of an error of kind "auth"."""
    return (
        f"the store at REDIS_URL refuses us ({error}): answers are the same, but slower, without "
        "stored draft trees. Put the user and password it knows into REDIS_URL "
        "(redis://USER:PASSWORD@HOST:PORT) and restart; what the user must be allowed is in "
        "deployments/valkey/users.acl.template"
    )


class TreeStore(Protocol):
    """Every method may raise StoreError and nothing else."""

    async def fetch(self, namespace: str, tree_ids: Sequence[int]) -> list[bytes | None]:
        """Blobs in the order of the ids, in one round trip; None where there is none.

        Never returns more than MAX_BLOB_BYTES + 1 bytes of a value, however large it is.
        """
        ...

    async def put(self, namespace: str, tree_id: int, blob: bytes) -> None:
        """Store the whole blob, replacing an older one and renewing its time to live."""
        ...

    async def put_many(self, namespace: str, blobs: Mapping[int, bytes]) -> None:
        """`put` each blob under its id, in one round trip."""
        ...

    async def drop(self, namespace: str, tree_ids: Sequence[int]) -> None:
        """Delete blobs and their listing; unknown ids are ignored."""
        ...

    async def tree_ids(self, namespace: str, limit: int, offset: int = 0) -> list[int]:
        """Ids written within the time to live, newest first, after the first `offset`; some may be
        evicted meanwhile."""
        ...

    async def count(self, namespace: str) -> int:
        """How many ids are listed; some may have expired or been evicted."""
        ...

    async def listed(self, namespace: str, tree_ids: Sequence[int]) -> list[bool]:
        """Whether `tree_ids` would give each of these ids."""
        ...

    async def aclose(self) -> None: ...


class InMemoryStore:
    """A dictionary with a time to live. For tests and for running without Redis."""

    def __init__(
        self, *, ttl_s: float = DEFAULT_TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._values: dict[tuple[str, int], tuple[float, bytes]] = {}  # key -> (expiry, blob)

    async def fetch(self, namespace: str, tree_ids: Sequence[int]) -> list[bytes | None]:
        now = self._clock()
        found = [self._values.get((namespace, tree_id)) for tree_id in tree_ids]
        return [v[1][: MAX_BLOB_BYTES + 1] if v and v[0] > now else None for v in found]

    async def put(self, namespace: str, tree_id: int, blob: bytes) -> None:
        self._values.pop((namespace, tree_id), None)  # so that insertion order is write order
        self._values[namespace, tree_id] = (self._clock() + self._ttl_s, blob)

    async def put_many(self, namespace: str, blobs: Mapping[int, bytes]) -> None:
        for tree_id, blob in blobs.items():
            await self.put(namespace, tree_id, blob)

    async def drop(self, namespace: str, tree_ids: Sequence[int]) -> None:
        for tree_id in tree_ids:
            self._values.pop((namespace, tree_id), None)

    async def tree_ids(self, namespace: str, limit: int, offset: int = 0) -> list[int]:
        now = self._clock()
        self._values = {key: value for key, value in self._values.items() if value[0] > now}
        newest_first = [id_ for name, id_ in reversed(self._values) if name == namespace]
        return newest_first[offset : offset + limit]

    async def count(self, namespace: str) -> int:
        return sum(name == namespace for name, _ in self._values)

    async def listed(self, namespace: str, tree_ids: Sequence[int]) -> list[bool]:
        now = self._clock()
        found = [self._values.get((namespace, tree_id)) for tree_id in tree_ids]
        return [value is not None and value[0] > now for value in found]

    async def aclose(self) -> None:
        return None
