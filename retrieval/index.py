"""Nearest earlier requests by inner product: the contract, and an exact implementation in numpy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


class Neighbours(NamedTuple):
    """Search result, most similar first; may be shorter than asked for.

    ids:    int64 [n], each once
    scores: float32 [n], finite inner products with the query
    """

    ids: Int64Array
    scores: Float32Array


class VectorIndex(Protocol):
    """Vectors under int64 ids. Any thread may call any method at any time.

    An id is never reused: it names the same vector for ever, so adding a known id changes no
    vector; but it counts as added just now. Vectors may be kept in half precision. Searches see
    all of an `add` or none of it.
    """

    @property
    def dim(self) -> int: ...

    def __len__(self) -> int:
        """Number of vectors a search can return."""
        ...

    def __contains__(self, id_: int) -> bool: ...

    def add(self, ids: Int64Array, vectors: Float32Array) -> None:
        """Add vectors float32 [n, dim] under ids int64 [n].

        Raises ValueError for another dtype or shape, a negative id or a NaN.
        """
        ...

    def remove(self, ids: Sequence[int]) -> None:
        """Hide ids from later searches; unknown ids are ignored."""
        ...

    def oldest(self, n: int, skip: int = 0) -> list[int]:
        """The n ids added first, of those a search can return, after the first `skip`."""
        ...

    def mean(self) -> Float32Array:
        """Mean of the vectors, float32 [dim], zeros at first; removed ones may still count."""
        ...

    def search(self, query: Float32Array, k: int) -> Neighbours:
        """The k vectors with the greatest inner product with query float32 [dim].

        Large indexes may miss some of them. Raises ValueError for a query of another dtype or
        shape.
        """
        ...

    def compact(self) -> bool:
        """Tidy up once, beside all other calls; False if there was nothing to do."""
        ...


class InMemoryIndex:
    """Exact search over one numpy array. One lock guards everything: meant for tests and small
    sets, where simple beats concurrent."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._lock = threading.Lock()
        self._vectors: dict[int, Float32Array] = {}

    @property
    def dim(self) -> int:
        return self._dim

    def __len__(self) -> int:
        with self._lock:
            return len(self._vectors)

    def __contains__(self, id_: int) -> bool:
        with self._lock:
            return id_ in self._vectors

    def add(self, ids: Int64Array, vectors: Float32Array) -> None:
        check_vectors(ids, vectors, self._dim)
        with self._lock:
            for id_, vector in zip(ids.tolist(), vectors, strict=True):
                self._vectors[id_] = self._vectors.pop(id_, vector).copy()

    def remove(self, ids: Sequence[int]) -> None:
        with self._lock:
            for id_ in ids:
                self._vectors.pop(id_, None)

    def oldest(self, n: int, skip: int = 0) -> list[int]:
        with self._lock:
            return list(islice(self._vectors, skip, skip + n))

    def mean(self) -> Float32Array:
        with self._lock:
            total = np.zeros(self._dim, np.float32)
            for vector in self._vectors.values():
                total += vector
            return total / np.float32(max(len(self._vectors), 1))

    def search(self, query: Float32Array, k: int) -> Neighbours:
        check_query(query, self._dim)
        with self._lock:
            found = dict(self._vectors)
        ids = np.fromiter(found, np.int64, len(found))
        matrix = np.array(list(found.values()), np.float32).reshape(len(ids), self._dim)
        return top_k(ids, matrix @ query, k)

    def compact(self) -> bool:
        return False


def top_k(ids: Int64Array, scores: Float32Array, k: int) -> Neighbours:
    """Order by falling score and cut; drop ids below 0 and scores that are not finite."""
    usable = (ids >= 0) & np.isfinite(scores)
    ids, scores = ids[usable], scores[usable]
    order = np.argsort(-scores, kind="stable")[: max(k, 0)]
    return Neighbours(ids[order], scores[order])


def check_vectors(ids: Int64Array, vectors: Float32Array, dim: int) -> None:
    """Raise ValueError unless ids int64 [n] >= 0 and vectors float32 [n, dim] are finite."""
    if vectors.dtype != np.float32 or vectors.shape != (len(ids), dim):
        raise ValueError(
            f"vectors are {vectors.dtype} {list(vectors.shape)}, "
            f"this index holds float32 [{len(ids)}, {dim}]"
        )
    if ids.dtype != np.int64 or ids.ndim != 1 or (len(ids) and ids.min() < 0):
        raise ValueError(f"ids must be int64 [n] and not negative, got {ids.dtype} {ids.shape}")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors have infinite or NaN entries")


def check_query(query: Float32Array, dim: int) -> None:
    """Raise ValueError unless the query is a finite float32 [dim]."""
    if query.dtype != np.float32 or query.shape != (dim,):
        raise ValueError(
            f"query is {query.dtype} {list(query.shape)}, this index holds float32 [{dim}]"
        )
    if not np.isfinite(query).all():
        raise ValueError("query has infinite or NaN entries")
