"""One vector index per namespace, searched and changed off the event loop, failing softly.

All of them together hold max_trees; beyond that the largest forgets its oldest. Compaction has a
thread of its own: it may take a minute, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from retrieval.embedding import EMBEDDING_DIM
from retrieval.index import Float32Array, VectorIndex

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class NamespaceIndexes:
    """Every failure is logged, counted as `index_error`, and means "nothing found"."""

    def __init__(
        self,
        factory: Callable[[int], VectorIndex],
        workers: Executor,
        counts: Counter[str],
        *,
        max_trees: int,
    ) -> None:
        """factory makes an empty index of a dimension; a tree takes 1 KiB of it."""
        self._factory = factory
        self._workers = workers
        self._counts = counts
        self._max_trees = max_trees
        self._indexes: dict[str, VectorIndex] = {}
        self._compactor = ThreadPoolExecutor(1, thread_name_prefix="compaction")
        self._compacting: set[str] = set()

    def close(self) -> None:
        """Begin no further compaction."""
        self._compactor.shutdown(wait=False, cancel_futures=True)

    def sizes(self) -> dict[str, int]:
        return {name: len(index) for name, index in self._indexes.items()}

    def contains(self, namespace: str, id_: int) -> bool:
        return namespace in self._indexes and id_ in self._indexes[namespace]

    async def search(self, namespace: str, query: Float32Array, k: int) -> list[int]:
        """Ids of the k most similar requests, best first; query float32 [EMBEDDING_DIM]."""

        def run(index: VectorIndex) -> list[int]:
            # All prompts of a namespace share a template. What the mean has, every request has:
            # without it the query is what this request says and others do not.
            ids: list[int] = index.search(query - index.mean(), k).ids.tolist()
            return ids

        return await self._call(namespace, run, failed=[])

    async def add(self, namespace: str, vectors: Mapping[int, Float32Array]) -> bool:
        """Index vectors by id; False if that failed.

        Without vectors it only makes sure that there is an index.
        """

        def run(index: VectorIndex) -> bool:
            if vectors:
                ids = np.fromiter(vectors, np.int64, len(vectors))
                index.add(ids, np.stack(list(vectors.values())))
            return True

        added = await self._call(namespace, run, failed=False)
        await self._evict()
        self._start_compaction(namespace)
        return added

    async def oldest(self, namespace: str, n: int, skip: int) -> list[int]:
        """The n ids added first, after the first `skip`."""
        return await self._call(namespace, lambda index: index.oldest(n, skip), failed=[])

    async def remove(self, namespace: str, ids: Sequence[int]) -> None:
        if ids and namespace in self._indexes:
            await self._call(namespace, lambda index: index.remove(ids), failed=None)

    async def _evict(self) -> None:
        """Forget the oldest of the largest while there are too many."""
        sizes = self.sizes()
        excess = sum(sizes.values()) - self._max_trees
        if excess > 0:
            largest = max(sizes, key=lambda name: sizes[name])
            # A sixteenth at a time: removal costs a pass over the index.
            count = excess + self._max_trees // 16
            await self._call(largest, lambda i: i.remove(i.oldest(count)), failed=None)
            self._start_compaction(largest)

    def _start_compaction(self, namespace: str) -> None:
        if namespace not in self._indexes or namespace in self._compacting:
            return
        self._compacting.add(namespace)
        self._compactor.submit(self._compact, namespace, self._indexes[namespace])

    def _compact(self, namespace: str, index: VectorIndex) -> None:
        try:
            while index.compact():
                pass
        except Exception as error:  # noqa: BLE001 - searches go on with what there is
            _log.warning("compaction of namespace %s failed: %r", namespace, error)
            self._counts["index_error"] += 1
        finally:
            self._compacting.discard(namespace)

    async def _call(self, namespace: str, run: Callable[[VectorIndex], _T], *, failed: _T) -> _T:
        try:
            index = self._indexes.get(namespace)
            if index is None:
                index = self._indexes[namespace] = self._factory(EMBEDDING_DIM)
            return await asyncio.get_running_loop().run_in_executor(self._workers, run, index)
        except Exception as error:  # noqa: BLE001 - however it fails, requests go on
            _log.warning("index of namespace %s failed: %r", namespace, error)
            self._counts["index_error"] += 1
            return failed
