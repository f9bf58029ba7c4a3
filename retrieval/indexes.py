"""One vector index per namespace, searched and changed off the event loop, failing softly."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
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
        """factory makes an empty index of a dimension; max_trees bounds each namespace."""
        self._factory = factory
        self._workers = workers
        self._counts = counts
        self._max_trees = max_trees
        self._indexes: dict[str, VectorIndex] = {}

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
        """Index vectors by id and forget the oldest beyond max_trees; False if that failed.

        Without vectors it only makes sure that there is an index.
        """

        def run(index: VectorIndex) -> bool:
            if vectors:
                ids = np.fromiter(vectors, np.int64, len(vectors))
                index.add(ids, np.stack(list(vectors.values())))
            excess = len(index) - self._max_trees
            if excess > 0:
                # A sixteenth at a time: removal costs a pass over the index.
                index.remove(index.oldest(excess + self._max_trees // 16))
            return True

        return await self._call(namespace, run, failed=False)

    async def remove(self, namespace: str, ids: Sequence[int]) -> None:
        if ids and namespace in self._indexes:
            await self._call(namespace, lambda index: index.remove(ids), failed=None)

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
