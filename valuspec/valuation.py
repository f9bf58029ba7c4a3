"""Value candidate nodes before the target verifies them, and keep those that pay.

    evidence of an edge  ->  transfer rate  ->  product along the path = value  ->  kept nodes

`keep` sees trees and thresholds and returns node indices. It cannot reach what the target
accepts: a bad threshold costs speed, never a token.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valuspec import evidence
from valuspec.evidence import CandidateTree, Evidence, signatures
from valuspec.jit import kernel
from valuspec.thresholds import MAX_NODES, BatchBucket, ThresholdSet
from valuspec.tree import DraftTree

__all__ = [
    "BatchBucket",
    "ThresholdSet",
    "expected_gain",
    "keep",
    "prune_retrieved",
    "select",
    "values",
]

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]


def values(candidate: CandidateTree, thresholds: ThresholdSet) -> FloatArray:
    """Estimated probability that verification reaches each node, float32 [num_nodes]."""
    out = np.empty(len(candidate), np.float32)
    _values(signatures(candidate.evidence), candidate.tree.parents, thresholds.rates, out)
    return out


def keep(
    candidate: CandidateTree, thresholds: ThresholdSet, *, batch_size: int, max_nodes: int
) -> IntArray:
    """Indices of the nodes worth verifying: ascending and ancestor-closed, perhaps none.

    Nodes are taken by falling value. Of all prefixes of that order, the one is kept whose
    expected tokens exceed the price of its verify cost by most; nodes below tau never count.
    """
    value = values(candidate, thresholds)
    return select(
        value,
        thresholds,
        batch_size=batch_size,
        max_nodes=max_nodes,
        context=candidate.context,
    )


def select(
    value: FloatArray,
    thresholds: ThresholdSet,
    *,
    batch_size: int,
    max_nodes: int,
    context: int = 0,
) -> IntArray:
    """As `keep`, for nodes whose values [num_nodes] are known, behind so many tokens."""
    bucket = thresholds.bucket_index(batch_size)
    tau, prices = thresholds.buckets[bucket].tau, thresholds.prices[bucket]
    scale, slope = thresholds.prices_behind(bucket, context)
    most = min(max_nodes, MAX_NODES)
    return np.sort(_best(value, tau, prices, float(scale), float(slope), most)[0])


def expected_gain(candidate: CandidateTree, thresholds: ThresholdSet, *, batch_size: int) -> float:
    """Tokens that the nodes worth verifying are expected to bring beyond their price."""
    bucket = thresholds.bucket_index(batch_size)
    tau, prices = thresholds.buckets[bucket].tau, thresholds.prices[bucket]
    scale, slope = thresholds.prices_behind(bucket, candidate.context)
    value = values(candidate, thresholds)
    return float(_best(value, tau, prices, float(scale), float(slope), MAX_NODES)[1])


def prune_retrieved(tree: DraftTree, thresholds: ThresholdSet, similarity: float) -> IntArray:
    """Indices of a stored tree's nodes that some step could keep: ascending, ancestor-closed.

    Where the context will match is not known yet, so an edge counts with the best rate its own
    counts could earn at any match length and depth.
    """
    if similarity < thresholds.min_similarity:
        return np.empty(0, np.int32)
    tau = min(bucket.tau for bucket in thresholds.buckets)
    alone = Evidence.of_tree(tree)
    by_signature = thresholds.rates[: evidence.NUM_OCCURRENCE_CODES].reshape(evidence.SHAPE)
    best = by_signature.max(axis=(1, 3))  # [share, parent count]
    share = np.searchsorted(evidence.SHARE_EDGES, alone.share, side="right")
    count = np.searchsorted(evidence.COUNT_EDGES, alone.parent_occurrences, side="right")
    possible = (best[share, count] >= tau).tolist()
    for node, parent in enumerate(tree.parents.tolist()):
        possible[node] = possible[node] and (parent < 0 or possible[parent])
    return np.flatnonzero(possible).astype(np.int32)


@kernel
def _values(
    codes: NDArray[np.integer[Any]],
    parents: NDArray[np.integer[Any]],
    rates: FloatArray,
    out: FloatArray,
) -> None:
    for node in range(codes.size):
        above = np.float32(1.0) if parents[node] < 0 else out[parents[node]]
        out[node] = above * rates[codes[node]]


def path_products(
    codes: NDArray[np.integer[Any]],
    parents: NDArray[np.signedinteger[Any]],
    first_node: NDArray[np.int64],
    rates: FloatArray,
) -> FloatArray:
    """Values of the nodes of many trees, laid end to end, float32 [num_nodes].

    Tree t is nodes first_node[t] to first_node[t + 1]; its parents count from its own first node.
    """
    out = np.empty(len(codes), np.float32)
    for first, end in itertools.pairwise(first_node.tolist()):
        _values(codes[first:end], parents[first:end], rates, out[first:end])
    return out


@kernel
def walk(
    codes: NDArray[np.integer[Any]],
    parents: NDArray[np.signedinteger[Any]],
    taken: NDArray[np.bool_],
    first_node: NDArray[np.int64],
    ends: NDArray[np.int64],
    rates: FloatArray,
    tau: float,
    prices: NDArray[np.float64],
    scales: NDArray[np.float64],
    slopes: NDArray[np.float64],
    max_nodes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Decode trajectories whose candidate trees are known: (positions, kept, accepted) by step.

    Trees as in `path_products`, one per position; trajectory k ends at position ends[k]. A step
    goes on behind what the target accepts and the token it adds. scales, slopes: of prices, by
    position.
    """
    positions = np.empty(first_node.size, np.int64)
    kept, accepted = np.empty_like(positions), np.empty_like(positions)
    largest = 0
    for tree in range(first_node.size - 1):
        largest = max(largest, first_node[tree + 1] - first_node[tree])
    value = np.empty(largest, np.float32)
    steps, position = 0, 0
    for end in ends:
        while position < end:
            first, last = first_node[position], first_node[position + 1]
            offered = value[: last - first]
            _values(codes[first:last], parents[first:last], rates, offered)
            nodes, _ = _best(offered, tau, prices, scales[position], slopes[position], max_nodes)
            positions[steps], kept[steps], accepted[steps] = position, nodes.size, 0
            for node in nodes:
                accepted[steps] += taken[first + node]
            position += accepted[steps] + 1
            steps += 1
        position = end
    return positions[:steps].copy(), kept[:steps].copy(), accepted[:steps].copy()


@kernel
def _best(
    value: FloatArray,
    tau: float,
    prices: NDArray[np.float64],
    scale: float,
    slope: float,
    max_nodes: int,
) -> tuple[IntArray, float]:
    """The nodes worth verifying, by falling value, and the tokens expected beyond their price."""
    # Insertion sort by falling value. It is stable, so a parent (earlier, and never worth less)
    # stays before its children, and every prefix is ancestor-closed.
    order = np.empty(value.size, np.int32)
    size = 0
    for node in range(value.size):
        if value[node] < tau:
            continue
        i = size
        while i > 0 and value[order[i - 1]] < value[node]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = node
        size += 1
    best, best_gain, expected = 0, 0.0, 0.0
    for b in range(1, min(size, max_nodes) + 1):
        expected += value[order[b - 1]]
        gain = expected - (scale * prices[b] + slope * b)
        if gain > best_gain:
            best, best_gain = b, gain
    return order[:best], best_gain
