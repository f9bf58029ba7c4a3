"""A part of a vector index that never changes: what FAISS holds, and which rows still count.

Vectors are kept in half precision, as they lie in the store: 1 KiB for 512 dimensions. Small
segments are searched exhaustively. From IVF_ROWS on, rows are grouped around centroids (an
inverted file, IVF; Sivic and Zisserman 2003) and a search reads the groups nearest to the query.
docs/retrieval.md has latency, memory and recall of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.index import Float32Array, Int64Array

IVF_ROWS = 1 << 16
"""From here on an exhaustive search takes longer (3 ms) than it is worth."""
ROWS_PER_CENTROID = 39  # fewer in training, and FAISS warns of poor clusters
PROBED_SHARE = 6
"""One in so many groups is searched."""
_TRAINING_ROUNDS = 8
_COPIED_ROWS = 1 << 14

Blocks = Callable[[], Iterable[Float32Array]]
"""Gives the same vectors each time it is called."""

_HALF = faiss.ScalarQuantizer.QT_fp16


@dataclass(frozen=True)
class Segment:
    """
    ids:   int64 [n], of the rows of `index`
    total: float64 [dim], the sum of all rows
    live:  bool [n], which rows a search can return; None where all are
    """

    index: faiss.Index
    ids: Int64Array
    total: NDArray[np.float64]
    live: NDArray[np.bool_] | None = None

    @classmethod
    def build(cls, dim: int, ids: Int64Array, blocks: Blocks) -> Segment:
        """Index vectors float32 [n, dim], in blocks, under ids int64 [n].

        It is gone through twice where an IVF has to be trained.
        """
        index: faiss.Index
        if len(ids) < IVF_ROWS:
            index = faiss.IndexScalarQuantizer(dim, _HALF, faiss.METRIC_INNER_PRODUCT)
        else:
            num_lists = math.isqrt(len(ids))
            centroids = faiss.IndexFlatIP(dim)
            index = faiss.IndexIVFScalarQuantizer(
                centroids, dim, num_lists, _HALF, faiss.METRIC_INNER_PRODUCT, False
            )
            index.nprobe = max(1, num_lists // PROBED_SHARE)
            index.cp.niter = _TRAINING_ROUNDS
            # Rows of one time may differ from those of another: the sample is spread over all.
            step = max(1, len(ids) // (num_lists * ROWS_PER_CENTROID))
            index.train(np.concatenate([block[::step] for block in blocks()]))
        total = np.zeros(dim, np.float64)
        for block in blocks():
            index.add(block)
            total += block.sum(axis=0, dtype=np.float64)
        return cls(index, ids, total)

    @classmethod
    def merge(cls, dim: int, segments: Sequence[Segment]) -> Segment:
        """One segment of the live rows of several, in their order."""
        ids = np.concatenate([s.ids if s.live is None else s.ids[s.live] for s in segments])
        return cls.build(dim, ids, lambda: (block for s in segments for block in s.vectors()))

    def __len__(self) -> int:
        """Rows that a search can return."""
        return len(self.ids) if self.live is None else int(self.live.sum())

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    def without(self, ids: Int64Array) -> Segment:
        """The same rows, those of `ids` hidden."""
        hit = np.isin(self.ids, ids)
        if not hit.any():
            return self
        return replace(self, live=~hit if self.live is None else self.live & ~hit)

    def lost(self, later: Segment) -> Int64Array:
        """Ids of the rows that are dead in a later state of this segment, and were not in this."""
        if later.live is None:
            return self.ids[:0]
        return self.ids[~later.live if self.live is None else self.live & ~later.live]

    def vectors(self) -> Iterator[Float32Array]:
        """The live rows, in blocks."""
        for start in range(0, len(self.ids), _COPIED_ROWS):
            stop = min(start + _COPIED_ROWS, len(self.ids))
            block = self.index.reconstruct_n(start, stop - start)
            yield block if self.live is None else block[self.live[start:stop]]

    def search(self, query: Float32Array, k: int) -> tuple[Int64Array, Float32Array]:
        """Ids and inner products of the best live rows, k at most, padding included."""
        scores, rows = self.index.search(query[None], min(k, self.num_rows), params=self._params)
        # FAISS pads with -1, which as a row number would be the last row.
        found = rows[0] >= 0
        return self.ids[rows[0][found]], scores[0][found]

    @cached_property
    def _params(self) -> faiss.SearchParameters | None:
        if self.live is None:
            return None
        # FAISS's stubs know the C++ constructors only.
        bits = np.packbits(self.live, bitorder="little")
        selector = faiss.IDSelectorBitmap(bits)  # type: ignore[call-arg, arg-type]
        if isinstance(self.index, faiss.IndexIVF):
            nprobe = self.index.nprobe
            return faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)  # type: ignore[call-arg]
        return faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
