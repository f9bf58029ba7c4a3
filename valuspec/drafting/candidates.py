"""Merge what followed all earlier occurrences into one candidate tree.

Every continuation is walked into a pool (a trie); each pool node remembers the longest match that
came through it, its sources, and how much evidence it and its children have. The tree offered to
valuation is the part of the pool with the highest path shares, found best-first, so parents come
before children and the tree is ancestor-closed by construction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec.drafting.suffix import CONTEXT, MAX_MATCH, Continuations
from valuspec.evidence import CandidateTree, Evidence
from valuspec.jit import kernel
from valuspec.tree import DraftTree

POOL_NODES = 2048
"""Trie nodes per step; continuations of the shortest matches are dropped beyond it."""

OWN = 1
"""`Source.OWN`; a kernel reads constants of its own file only."""

IntArray = NDArray[np.int32]

MATCH_WEIGHT = np.array([float(length * length) for length in range(MAX_MATCH + 1)])
"""How much one occurrence weighs by match length: long matches outvote short ones."""
AGREEMENT_WEIGHT = np.array([1.1**equal for equal in range(CONTEXT + 1)])
"""And by agreement: of matches as long, those in a like passage count more."""
DOUBT = 4.0
"""Weight of the unseen: a lone short match keeps a small share."""


class _Pool(NamedTuple):
    """Trie of continuations; node 0 is the context. And a heap of nodes by path share."""

    token: IntArray
    parent: IntArray
    depth: IntArray
    first_child: IntArray
    next_sibling: IntArray
    sources: IntArray
    match_length: IntArray
    visits: NDArray[np.int64]
    child_visits: NDArray[np.int64]
    support: NDArray[np.float64]
    child_support: NDArray[np.float64]
    own_support: NDArray[np.float64]
    child_own_support: NDArray[np.float64]
    kept_as: IntArray
    heap_node: IntArray
    heap_score: NDArray[np.float64]

    @classmethod
    def allocate(cls) -> _Pool:
        def int32() -> IntArray:
            return np.zeros(POOL_NODES, np.int32)

        def int64() -> NDArray[np.int64]:
            return np.zeros(POOL_NODES, np.int64)

        def double() -> NDArray[np.float64]:
            return np.zeros(POOL_NODES, np.float64)

        return cls(
            token=int32(), parent=int32(), depth=int32(), first_child=int32(),
            next_sibling=int32(), sources=int32(), match_length=int32(), visits=int64(),
            child_visits=int64(), support=double(), child_support=double(), own_support=double(),
            child_own_support=double(), kept_as=int32(), heap_node=int32(), heap_score=double(),
        )  # fmt: skip


class CandidateBuilder:
    """Builds candidate trees; owns the working memory, so one per thread."""

    def __init__(self) -> None:
        self._pool = _Pool.allocate()

    def build(
        self, found: Continuations, num_rows: int, max_nodes: int, max_depth: int, context: int = 0
    ) -> CandidateTree:
        """Merge the first `num_rows` continuations into a tree of at most `max_nodes` nodes.

        context: tokens before it
        """
        integers = np.empty((7, max_nodes), np.int32)
        floats = np.full((3, max_nodes), np.nan, np.float32)
        size = _build(self._pool, found, num_rows, max_nodes, max_depth, integers, floats)
        tokens, parents, counts, parent_counts, sources, lengths, depths = integers[:, :size]
        share, own_share, none = floats[:, :size]
        evidence = Evidence(
            sources, lengths, counts, parent_counts, depths, share, own_share, probability=none,
            rank=np.zeros(size, np.int32),
        )  # fmt: skip
        return CandidateTree(DraftTree(tokens, parents, counts), evidence, context)


@kernel
def _build(
    pool: Any, found: Any, num_rows: int, max_nodes: int, max_depth: int, integers: Any, floats: Any
) -> int:
    used = _new_node(pool, 0, -1, -1)
    for length in range(MAX_MATCH, 0, -1):
        reach = min(max_depth, draft_reach(length), found.tokens.shape[1])
        for row in range(num_rows):
            if found.lengths[row] != length:
                continue
            row_weight = MATCH_WEIGHT[length] * AGREEMENT_WEIGHT[found.agreement[row]]
            node = 0
            for depth in range(reach):
                token = found.tokens[row, depth]
                if token < 0:
                    break
                child = pool.first_child[node]
                while child >= 0 and pool.token[child] != token:
                    child = pool.next_sibling[child]
                if child < 0:
                    if used == POOL_NODES:
                        break
                    child = used
                    used = _new_node(pool, child, token, node)
                    pool.match_length[child] = length
                weight = found.weights[row, depth]
                support = row_weight * weight
                pool.sources[child] |= found.sources[row]
                pool.visits[child] += weight
                pool.child_visits[node] += weight
                pool.support[child] += support
                pool.child_support[node] += support
                if found.sources[row] == OWN:
                    pool.own_support[child] += support
                    pool.child_own_support[node] += support
                node = child
    return _select(pool, max_nodes, integers, floats)


@kernel
def _new_node(pool: Any, node: int, token: int, parent: int) -> int:
    pool.token[node] = token
    pool.parent[node] = parent
    pool.depth[node] = 0
    pool.first_child[node] = -1
    pool.next_sibling[node] = -1
    pool.sources[node] = 0
    pool.match_length[node] = 0
    pool.visits[node] = 0
    pool.child_visits[node] = 0
    pool.support[node] = 0.0
    pool.child_support[node] = 0.0
    pool.own_support[node] = 0.0
    pool.child_own_support[node] = 0.0
    if parent >= 0:
        pool.depth[node] = pool.depth[parent] + 1
        pool.next_sibling[node] = pool.first_child[parent]
        pool.first_child[parent] = node
    return node + 1


@kernel
def draft_reach(length: int) -> int:
    """Draft depth allowed to a match of `length` tokens: short matches soon go astray."""
    return 2 + 2 * length


@kernel
def _select(pool: Any, max_nodes: int, integers: Any, floats: Any) -> int:
    """Best-first by path share; writes tree and evidence, returns the number of nodes."""
    heap = _push_children(pool, 0, 1.0, 0)
    pool.kept_as[0] = -1
    size = 0
    while heap > 0 and size < max_nodes:
        node, score = pool.heap_node[0], pool.heap_score[0]
        heap = _pop(pool, heap)
        parent = pool.parent[node]
        integers[0, size] = pool.token[node]
        integers[1, size] = pool.kept_as[parent]
        integers[2, size] = min(pool.visits[node], 2**31 - 1)
        integers[3, size] = min(pool.child_visits[parent], 2**31 - 1)
        integers[4, size] = pool.sources[node]
        integers[5, size] = pool.match_length[node]
        integers[6, size] = pool.depth[node]
        floats[0, size] = pool.support[node] / pool.child_support[parent]
        if pool.child_own_support[parent] > 0:
            floats[1, size] = pool.own_support[node] / pool.child_own_support[parent]
        pool.kept_as[node] = size
        size += 1
        heap = _push_children(pool, node, score, heap)
    return size


@kernel
def _push_children(pool: Any, node: int, score: float, heap: int) -> int:
    total = pool.child_support[node] + DOUBT
    child = pool.first_child[node]
    while child >= 0:
        if pool.visits[child] > 0:
            value = score * pool.support[child] / total
            i = heap
            heap += 1
            while i > 0 and pool.heap_score[(i - 1) // 2] < value:
                pool.heap_score[i] = pool.heap_score[(i - 1) // 2]
                pool.heap_node[i] = pool.heap_node[(i - 1) // 2]
                i = (i - 1) // 2
            pool.heap_score[i], pool.heap_node[i] = value, child
        child = pool.next_sibling[child]
    return heap


@kernel
def _pop(pool: Any, heap: int) -> int:
    heap -= 1
    value, node = pool.heap_score[heap], pool.heap_node[heap]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= heap:
            break
        if child + 1 < heap and pool.heap_score[child + 1] > pool.heap_score[child]:
            child += 1
        if pool.heap_score[child] <= value:
            break
        pool.heap_score[i], pool.heap_node[i] = pool.heap_score[child], pool.heap_node[child]
        i = child
    pool.heap_score[i], pool.heap_node[i] = value, node
    return heap
