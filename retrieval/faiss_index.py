"""VectorIndex on FAISS."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import faiss
import numpy as np

from retrieval.index import (
    Float32Array,
    Int64Array,
    Neighbours,
    check_query,
    check_vectors,
    top_k,
)

TAIL_ROWS = 2048
MAX_REMOVED = 64


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a search sees. Nothing in it changes once published.

    sealed:       IndexIDMap2 over IndexFlatIP, never added to again
    tail_ids:     int64 [t], t <= TAIL_ROWS, newer than everything sealed
    tail_vectors: float32 [t, dim]
    removed:      ids that are still in the arrays and must not be returned
    """

    sealed: faiss.IndexIDMap2
    tail_ids: Int64Array
    tail_vectors: Float32Array
    removed: frozenset[int]


class FaissIndex:
    """Flat FAISS index plus a small tail of new rows.

    FAISS allows concurrent searches but no search beside an add. So nothing is ever added to a
    published index: a writer (one at a time, under a lock) appends to the tail and publishes a new
    snapshot by one assignment; a full tail is sealed into a new FAISS index. Searches take the
    current snapshot and never wait. Rows of the tail buffer beyond a snapshot's length belong to
    the writer, so appending copies nothing.
    """

    def __init__(self, dim: int, *, num_threads: int = 1) -> None:
        self._dim = dim
        self._num_threads = num_threads
        self._write_lock = threading.Lock()
        self._known: dict[int, None] = {}  # in order of addition
        self._sum = np.zeros(dim, np.float64)
        self._new_tail()
        self._snapshot = self._with_empty_tail(_flat_index(dim))

    @property
    def dim(self) -> int:
        return self._dim

    def __len__(self) -> int:
        snapshot = self._snapshot
        rows = int(snapshot.sealed.ntotal) + len(snapshot.tail_ids)
        return rows - len(snapshot.removed)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._known and id_ not in self._snapshot.removed

    def add(self, ids: Int64Array, vectors: Float32Array) -> None:
        check_vectors(ids, vectors, self._dim)
        with self._write_lock:
            fresh = [row for row, id_ in enumerate(ids.tolist()) if self._learn(id_)]
            self._sum += vectors[fresh].sum(axis=0, dtype=np.float64)
            start = len(self._snapshot.tail_ids)
            stop = start + len(fresh)
            removed = self._snapshot.removed.difference(ids.tolist())
            if stop > TAIL_ROWS:
                self._seal(removed, ids[fresh], vectors[fresh])
                return
            self._tail_ids[start:stop] = ids[fresh]
            self._tail_vectors[start:stop] = vectors[fresh]
            self._snapshot = _Snapshot(
                self._snapshot.sealed, self._tail_ids[:stop], self._tail_vectors[:stop], removed
            )

    def remove(self, ids: Sequence[int]) -> None:
        with self._write_lock:
            removed = self._snapshot.removed.union(id_ for id_ in ids if id_ in self._known)
            if len(removed) <= MAX_REMOVED:
                self._snapshot = replace(self._snapshot, removed=removed)
                return
            # Every removed id widens each search by one: drop their rows now and then.
            self._seal(removed, np.empty(0, np.int64), np.empty((0, self._dim), np.float32))

    def oldest(self, n: int) -> list[int]:
        with self._write_lock:
            removed = self._snapshot.removed
            return list(islice((id_ for id_ in self._known if id_ not in removed), n))

    def mean(self) -> Float32Array:
        with self._write_lock:
            return (self._sum / max(len(self._known), 1)).astype(np.float32)

    def search(self, query: Float32Array, k: int) -> Neighbours:
        check_query(query, self._dim)
        snapshot = self._snapshot
        # OpenMP's thread count belongs to the calling thread, so it is set where the search runs.
        faiss.omp_set_num_threads(self._num_threads)
        wanted = min(max(k, 0) + len(snapshot.removed), int(snapshot.sealed.ntotal))
        # Not `@`: BLAS would wake its own threads, and beside a busy decoder waits for them.
        ids, scores = snapshot.tail_ids, np.einsum("ij,j->i", snapshot.tail_vectors, query)
        if wanted:
            sealed_scores, sealed_ids = snapshot.sealed.search(query[None], wanted)
            ids = np.concatenate([sealed_ids[0], ids])
            scores = np.concatenate([sealed_scores[0], scores])
        if snapshot.removed:
            present = ~np.isin(ids, list(snapshot.removed))
            ids, scores = ids[present], scores[present]
        return top_k(ids, scores, k)

    def _learn(self, id_: int) -> bool:
        if id_ in self._known:
            return False
        self._known[id_] = None
        return True

    def _seal(self, removed: frozenset[int], ids: Int64Array, vectors: Float32Array) -> None:
        """Publish one new FAISS index of all present rows and the given ones; empty the tail."""
        old = self._snapshot
        sealed_ids = faiss.vector_to_array(old.sealed.id_map)
        sealed_vectors = old.sealed.index.reconstruct_n(0, int(old.sealed.ntotal))
        all_ids = np.concatenate([sealed_ids, old.tail_ids, ids])
        all_vectors = np.concatenate([sealed_vectors, old.tail_vectors, vectors])
        present = ~np.isin(all_ids, list(removed))
        sealed = _flat_index(self._dim)
        sealed.add_with_ids(all_vectors[present], all_ids[present])
        self._sum -= all_vectors[~present].sum(axis=0, dtype=np.float64)
        for id_ in removed:
            self._known.pop(id_, None)
        self._new_tail()
        self._snapshot = self._with_empty_tail(sealed)

    def _new_tail(self) -> None:
        """Fresh buffers: earlier snapshots keep theirs."""
        self._tail_ids = np.empty(TAIL_ROWS, np.int64)
        self._tail_vectors = np.empty((TAIL_ROWS, self._dim), np.float32)

    def _with_empty_tail(self, sealed: faiss.IndexIDMap2) -> _Snapshot:
        return _Snapshot(sealed, self._tail_ids[:0], self._tail_vectors[:0], frozenset())


def _flat_index(dim: int) -> faiss.IndexIDMap2:
    return faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
