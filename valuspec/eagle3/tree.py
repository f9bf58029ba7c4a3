"""Dynamic draft trees, as in EAGLE-2 and EAGLE-3 (arXiv 2406.16858).

Level by level, the `top_k` likeliest nodes are expanded by their `top_k` likeliest children; of all
nodes seen, those of highest path probability are kept. Several requests grow their trees together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec.drafting.eagle3 import HeadDraft
from valuspec.jit import kernel
from valuspec.tree import DraftTree

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Likeliest = tuple[Int64Array, FloatArray]
"""Draft ids and log probabilities of what follows rows, [num_rows, top_k], likeliest first."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Defaults are those of the authors' code.

    top_k:        nodes expanded per level, and children of each
    depth:        expansions; the tree has one level more
    total_tokens: nodes kept, the pending token included
    """

    top_k: int = 10
    depth: int = 7
    total_tokens: int = 60


class Nodes(NamedTuple):
    """All nodes seen so far, [requests, nodes] each, a level behind the other."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    """-1, or a node of the same request"""
    ranks: NDArray[np.int32]
    log_p: FloatArray
    """Given the parent."""
    paths: FloatArray
    """Sum of it over the path."""


class Growth:
    """Trees of several requests, which grow by a level at a time.

    d2t: int64 [draft vocabulary], what to add to a draft id
    """

    def __init__(self, num_requests: int, shape: TreeShape, d2t: Int64Array) -> None:
        self.top_k = k = min(shape.top_k, len(d2t))
        self._size = shape.total_tokens - 1
        self._d2t = d2t
        most = (num_requests, k + shape.depth * k * k)
        self._nodes = Nodes._make(np.empty(most, t) for t in [np.int32] * 3 + [np.float32] * 2)
        self._num_nodes = 0
        self._frontier = np.full((num_requests, 1), -1)  # the context

    def add(self, likeliest: Likeliest) -> tuple[Int64Array, Int64Array]:
        """Add a level: the likeliest children of each node of the last frontier.

        likeliest: one row for each node of the frontier, one request's behind another's
        Returns of the next frontier, [requests * top_k] each, the tokens, and the parents as rows
        of what was given. Raises ValueError where log_p is not a number.
        """
        draft_ids, log_p = likeliest
        requests, width = self._frontier.shape
        frontier = np.empty((requests, self.top_k), np.int64)
        tokens, rows = np.empty((2, requests * self.top_k), np.int64)
        sound = _add_level(
            self._nodes, self._num_nodes, self._frontier, draft_ids, log_p, self._d2t,
            frontier, tokens, rows,
        )  # fmt: skip
        if not sound:
            raise ValueError("the draft head's logits are not numbers")
        self._num_nodes += width * self.top_k
        self._frontier = frontier
        return tokens, rows

    def drafts(self, max_depths: Sequence[int]) -> list[HeadDraft]:
        """The nodes of highest path probability, of at most so many levels."""
        k = self.top_k
        bounds = np.array([k + (depth - 1) * k * k for depth in max_depths])
        counts = _keep(self._nodes, self._num_nodes, self._size, bounds)
        drafts = []
        for request, count in enumerate(counts.tolist()):
            kept = Nodes._make(part[request, :count] for part in self._nodes)
            tree = DraftTree(kept.tokens, kept.parents, np.ones(count, np.int32))
            drafts.append(HeadDraft(tree, np.exp(kept.log_p), kept.ranks))
        return drafts


@kernel
def _add_level(
    nodes: Any, first: int, frontier: Any, draft_ids: Any, log_p: Any, d2t: Any,
    next_frontier: Any, tokens: Any, rows: Any,
) -> bool:  # fmt: skip
    """Nodes from `first` on; then the likeliest of them. False where one is not a number."""
    requests, width = frontier.shape
    k = draft_ids.shape[1]
    for request in range(requests):
        paths = nodes.paths[request]
        node = first
        for at in range(width):
            parent, row = frontier[request, at], request * width + at
            for rank in range(k):
                draft_id = draft_ids[row, rank]
                nodes.tokens[request, node] = draft_id + d2t[draft_id]
                nodes.parents[request, node] = parent
                nodes.ranks[request, node] = rank
                nodes.log_p[request, node] = log_p[row, rank]
                before = paths[parent] if parent >= 0 else np.float32(0)
                paths[node] = before + log_p[row, rank]
                if not paths[node] <= 0:
                    return False
                node += 1
        best = _best(paths[first:node], k)
        for at in range(k):
            chosen = best[at]
            next_frontier[request, at] = first + chosen
            tokens[request * k + at] = nodes.tokens[request, first + chosen]
            rows[request * k + at] = request * width + chosen // k
    return True


@kernel
def _keep(nodes: Any, num_nodes: int, size: int, bounds: Any) -> Any:
    """Move the best nodes of each request, of the first so many, to its front; how many they are.

    A parent comes before its child and is never less likely: where one is kept, the other is.
    """
    counts = np.zeros(len(bounds), np.int64)
    places = np.empty(num_nodes, np.int32)
    for request in range(len(bounds)):
        some = min(num_nodes, bounds[request])
        kept = np.sort(_best(nodes.paths[request, :some], min(size, some)))
        count = 0
        for node in kept:
            parent = nodes.parents[request, node]
            nodes.parents[request, count] = places[parent] if parent >= 0 else -1
            nodes.tokens[request, count] = nodes.tokens[request, node]
            nodes.ranks[request, count] = nodes.ranks[request, node]
            nodes.log_p[request, count] = nodes.log_p[request, node]
            places[node] = count
            count += 1
        counts[request] = count
    return counts


@kernel
def _best(values: Any, count: int) -> Any:
    """Where the greatest are, the greatest first; of equal ones the first."""
    taken = np.zeros(values.size, np.bool_)
    best = np.empty(count, np.int64)
    for rank in range(count):
        found = -1
        for at in range(values.size):
            if not taken[at] and (found < 0 or values[at] > values[found]):
                found = at
        taken[found] = True
        best[rank] = found
    return best
