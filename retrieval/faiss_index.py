"""VectorIndex on FAISS: one writer, readers on snapshots, compaction beside both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.index import (
    Float32Array,
    Int64Array,
    Neighbours,
    check_query,
    check_vectors,
    top_k,
)
from retrieval.segment import Segment

TAIL_ROWS = 2048
GROWTH = 4
"""A segment is merged into the one before it unless that is this many times larger."""
MAX_DEAD_SHARE = 4
"""A segment is rewritten when one row in so many is dead."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a search sees. Nothing in it changes once published.

    segments:     oldest first
    tail_ids:     int64 [t], t <= TAIL_ROWS, newer than everything in the segments; a removed
                  row's id is -1
    tail_vectors: float32 [t, dim]
    tail_total:   float64 [dim], the sum of all vectors that came to the tail
    """

    segments: tuple[Segment, ...]
    tail_ids: Int64Array
    tail_vectors: Float32Array
    tail_total: NDArray[np.float64]


class FaissIndex:
    """Segments that never change, and a small tail of new rows, as in a log-structured merge tree
    (O'Neil et al. 1996).

    FAISS allows concurrent searches but no search beside an add. So nothing is ever added to a
    published segment: a writer (one at a time, under a lock) appends to the tail and publishes a
    new snapshot by one assignment; a full tail becomes a segment. Searches take the current
    snapshot and never wait. Rows of the tail's buffer beyond a snapshot's length belong to the
    writer, so appending copies nothing.

    `compact` merges small segments into larger ones and drops dead rows. It holds the lock only to
    put the result in place, so adding, removing and searching go on beside it.
    """

    def __init__(self, dim: int, *, num_threads: int = 1) -> None:
        self._dim = dim
        self._num_threads = num_threads
        self._write_lock = threading.Lock()
        self._compact_lock = threading.Lock()
        self._known: dict[int, None] = {}  # live ids in order of addition
        self._tail_ids: Int64Array
        self._tail_vectors: Float32Array
        self._snapshot = self._with_empty_tail(())

    @property
    def dim(self) -> int:
        return self._dim

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._known

    def add(self, ids: Int64Array, vectors: Float32Array) -> None:
        check_vectors(ids, vectors, self._dim)
        with self._write_lock:
            fresh = [row for row, id_ in enumerate(ids.tolist()) if self._learn(id_)]
            ids, vectors = ids[fresh], vectors[fresh]
            old = self._snapshot
            start = len(old.tail_ids)
            stop = start + len(ids)
            if stop > TAIL_ROWS:
                self._snapshot = self._with_empty_tail(
                    (*old.segments, self._seal(old, ids, vectors))
                )
                return
            self._tail_ids[start:stop] = ids
            self._tail_vectors[start:stop] = vectors
            total = old.tail_total + vectors.sum(axis=0, dtype=np.float64)
            self._snapshot = _Snapshot(
                old.segments, self._tail_ids[:stop], self._tail_vectors[:stop], total
            )

    def remove(self, ids: Sequence[int]) -> None:
        with self._write_lock:
            gone = np.array([id_ for id_ in ids if id_ in self._known], np.int64)
            if not len(gone):
                return
            for id_ in gone.tolist():
                self._known.pop(id_, None)
            old = self._snapshot
            segments = tuple(segment.without(gone) for segment in old.segments)
            hit = np.isin(old.tail_ids, gone)
            if hit.any():  # earlier snapshots keep the buffer
                self._tail_ids = self._tail_ids.copy()
                self._tail_ids[: len(hit)][hit] = -1
            self._snapshot = replace(old, segments=segments, tail_ids=self._tail_ids[: len(hit)])

    def oldest(self, n: int, skip: int = 0) -> list[int]:
        with self._write_lock:
            return list(islice(self._known, skip, skip + n))

    def mean(self) -> Float32Array:
        snapshot = self._snapshot
        total = sum((segment.total for segment in snapshot.segments), snapshot.tail_total)
        rows = sum(segment.num_rows for segment in snapshot.segments) + len(snapshot.tail_ids)
        return (total / max(rows, 1)).astype(np.float32)

    def search(self, query: Float32Array, k: int) -> Neighbours:
        check_query(query, self._dim)
        snapshot = self._snapshot
        # OpenMP's thread count belongs to the calling thread, so it is set where the search runs.
        faiss.omp_set_num_threads(self._num_threads)
        # Not `@`: BLAS would wake its own threads, and beside a busy decoder waits for them.
        tail = np.einsum("ij,j->i", snapshot.tail_vectors, query)
        found = [(snapshot.tail_ids, tail)]
        if k > 0:
            found += [segment.search(query, k) for segment in snapshot.segments if len(segment)]
        return top_k(
            np.concatenate([ids for ids, _ in found]),
            np.concatenate([scores for _, scores in found]),
            k,
        )

    def compact(self) -> bool:
        """Merge what should be merged, once; False if there was nothing to do. For one thread
        that has time: a million rows take a minute."""
        with self._compact_lock:
            old = self._snapshot.segments
            first, last = _to_merge(old)
            if first == last:
                return False
            faiss.omp_set_num_threads(self._num_threads)
            merged = Segment.merge(self._dim, old[first:last])
            with self._write_lock:
                now = self._snapshot.segments  # longer by now, and with more dead rows
                lost = [b.lost(a) for b, a in zip(old[first:last], now[first:last], strict=True)]
                merged = merged.without(np.concatenate(lost))
                segments = (*now[:first], *([merged] if len(merged) else []), *now[last:])
                self._snapshot = replace(self._snapshot, segments=segments)
            return True

    def _learn(self, id_: int) -> bool:
        """Put the id last in order of addition; whether it is new."""
        is_new = id_ not in self._known
        self._known.pop(id_, None)
        self._known[id_] = None
        return is_new

    def _seal(self, old: _Snapshot, ids: Int64Array, vectors: Float32Array) -> Segment:
        """A segment of the live rows of the tail and new ones."""
        live = old.tail_ids >= 0
        all_ids = np.concatenate([old.tail_ids[live], ids])
        blocks = [old.tail_vectors[live], vectors]
        return Segment.build(self._dim, all_ids, lambda: blocks)

    def _with_empty_tail(self, segments: tuple[Segment, ...]) -> _Snapshot:
        """With fresh buffers: earlier snapshots keep theirs."""
        self._tail_ids = np.empty(TAIL_ROWS, np.int64)
        self._tail_vectors = np.empty((TAIL_ROWS, self._dim), np.float32)
        total = np.zeros(self._dim, np.float64)
        return _Snapshot(segments, self._tail_ids[:0], self._tail_vectors[:0], total)


def _to_merge(segments: Sequence[Segment]) -> tuple[int, int]:
    """The range of segments to merge into one: the newest that are not GROWTH times smaller than
    the one before them, else one with many dead rows; an empty range where there is none."""
    first = len(segments)
    rows = 0
    for index in range(len(segments) - 1, -1, -1):
        if rows and len(segments[index]) >= GROWTH * rows:
            break
        first = index
        rows += len(segments[index])
    if len(segments) - first > 1:
        return first, len(segments)
    for index, segment in enumerate(segments):
        if (segment.num_rows - len(segment)) * MAX_DEAD_SHARE > segment.num_rows:
            return index, index + 1
    return 0, 0
