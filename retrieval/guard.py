"""A TreeStore behind a circuit breaker, reading and writing trees instead of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from retrieval.breaker import CircuitBreaker
from retrieval.codec import BlobRejectedError, RejectReason, StoredTree, decode, encode
from retrieval.embedding import EMBEDDING_DIM
from retrieval.store import StoreError, TreeStore

_T = TypeVar("_T")


class Decoded(NamedTuple):
    """Blobs after validation: what can be used, and why the others cannot."""

    trees: dict[int, StoredTree]
    rejected: dict[int, RejectReason]


class GuardedStore:
    """Counts every failure, reports it to the breaker, and raises StoreError only.

    Callers ask `breaker.allow()` first; this class tells the breaker what came of it.
    """

    def __init__(
        self,
        store: TreeStore,
        breaker: CircuitBreaker,
        counts: Counter[str],
        *,
        vocab_size: int,
        on_error: Callable[[StoreError], None],
    ) -> None:
        self._store = store
        self._breaker = breaker
        self._counts = counts
        self._vocab_size = vocab_size
        self._on_error = on_error

    async def fetch(self, namespace: str, ids: Sequence[int]) -> dict[int, bytes]:
        """The blobs there are, by id."""
        blobs = await self._report(self._store.fetch(namespace, ids))
        if len(blobs) != len(ids):
            raise StoreError("protocol", f"{len(blobs)} replies to {len(ids)} ids")
        return {id_: blob for id_, blob in zip(ids, blobs, strict=True) if blob is not None}

    def decode(self, namespace: str, blobs: Mapping[int, bytes]) -> Decoded:
        """Validate what `fetch` returned. Thread-safe: takes milliseconds, so not on the loop."""
        decoded = Decoded({}, {})
        for id_, blob in blobs.items():
            try:
                stored = decode(blob, namespace=namespace, tree_id=id_, vocab_size=self._vocab_size)
            except BlobRejectedError as error:
                decoded.rejected[id_] = error.reason
                continue
            if len(stored.embedding) == EMBEDDING_DIM:
                decoded.trees[id_] = stored
            else:
                decoded.rejected[id_] = "structure"
        return decoded

    async def put(self, namespace: str, id_: int, stored: StoredTree) -> None:
        blob = encode(stored, namespace=namespace, tree_id=id_)
        await self._report(self._store.put(namespace, id_, blob))

    async def drop(self, namespace: str, ids: Sequence[int]) -> None:
        await self._report(self._store.drop(namespace, ids))

    async def tree_ids(self, namespace: str, limit: int, offset: int = 0) -> list[int]:
        return await self._report(self._store.tree_ids(namespace, limit, offset))

    async def listed(self, namespace: str, ids: Sequence[int]) -> list[bool]:
        return await self._report(self._store.listed(namespace, ids))

    async def _report(self, call: Awaitable[_T]) -> _T:
        try:
            result = await call
        except Exception as error:
            # Other exceptions break the store's contract; they must not reach a request either.
            failure = (
                error
                if isinstance(error, StoreError)
                else StoreError("protocol", f"{type(error).__name__}: {error}")
            )
            self._counts[f"store_error.{failure.kind}"] += 1
            self._breaker.record_failure()
            self._on_error(failure)
            if failure is error:
                raise
            raise failure from error
        self._breaker.record_success()
        return result
