"""Other ways to value the same candidate trees: each a list of what an edge is told apart by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valuspec import evidence as ev
from valuspec.calibration import TAUS, Reliability, score
from valuspec.cost import CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.evidence import CandidateTree, Evidence
from valuspec.replay import Trajectory, labels, offers
from valuspec.thresholds import smoothed
from valuspec.tree import DraftTree
from valuspec.valuation import path_products, walk

MAX_NODES = 64
GROWN_NODES = 16
"""Places kept for nodes of the transfer table where it is a source."""
TABLE_WIDTH = 3
"""Successors of the table tried under one node."""
NO_RANK = 99
FIXED_TAUS = (*TAUS, 0.16, 0.2, 0.25, 0.3, 0.4)
ROUNDS = 3

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Table = dict[int, list[int]]
"""The target's likeliest successors of a token, where it last stood."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A trajectory and what else was known when it was given.

    similarity: of the closest earlier request, cosine
    top_ids:    the target's likeliest tokens at the place of each output token; may be empty
    """

    trajectory: Trajectory
    similarity: float = 0.0
    top_ids: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes offered at all positions of some answers; laid out as `valuation.walk` reads it."""

    first_node: IntArray
    ends: IntArray
    parents: NDArray[np.int32]
    tested: NDArray[np.bool_]
    taken: NDArray[np.bool_]
    features: dict[str, FloatArray]

    def run(
        self, rates: FloatArray, tau: float, prices: FloatArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """(positions, kept, accepted) by step, for a rate per node."""
        each = np.arange(len(self.parents))
        positions = len(self.first_node) - 1
        return walk(each, self.parents, self.taken, self.first_node, self.ends,
                    rates.astype(np.float32), tau, prices, np.ones(positions), np.zeros(positions),
                    MAX_NODES)  # fmt: skip

    def offered(self, positions: IntArray) -> NDArray[np.bool_]:
        begins = np.zeros(len(self.first_node) - 1, bool)
        begins[positions] = True
        return np.repeat(begins, np.diff(self.first_node))

    def speed(self, kept: IntArray, cost: CostStaircase) -> float:
        return float(self.ends[-1] / cost.table(MAX_NODES + 1)[kept].sum())


def gather(answers: Sequence[Answer], drafter: Drafter, table: Table, *, grow: bool) -> Nodes:
    """Draft every position. The table learns an answer's rows as they are computed: the row of
    the token that is pending is not known yet."""
    columns: dict[str, list[NDArray[np.float32]]] = {}
    parents, tested, taken, sizes, lengths = [], [], [], [0], []
    for answer in answers:
        trajectory, known = answer.trajectory, dict(table)
        inputs = [int(trajectory.prompt_ids[-1]), *trajectory.output_ids.tolist()]
        for done, (candidate, future) in enumerate(offers(trajectory, drafter), start=1):
            if answer.top_ids:
                known[inputs[done - 1]] = list(answer.top_ids[done - 1])
            if grow:
                candidate = _grown(candidate, inputs[done], known, len(future) - 1)
            tree, evidence = candidate.tree, candidate.evidence
            last = answer.top_ids[done - 1] if answer.top_ids else ()
            before = [inputs[done] if p < 0 else int(tree.tokens[p]) for p in tree.parents]
            row: dict[str, NDArray[Any]] = {
                "frequency": evidence.occurrences / np.maximum(evidence.parent_occurrences, 1),
                "smoothed": (evidence.occurrences + 1) / (evidence.parent_occurrences + 2),
                "count": evidence.parent_occurrences,
                "length": evidence.match_length,
                "sources": evidence.sources,
                "depth": evidence.depth,
                "share": evidence.share,
                "own_share": np.nan_to_num(evidence.own_share, nan=-1),
                "similarity": np.full(len(tree), answer.similarity),
                "last_rank": np.array([
                    _rank(last, t) if p < 0 else NO_RANK
                    for t, p in zip(tree.tokens, tree.parents, strict=True)
                ]),
                "table_rank": np.array([
                    _rank(known.get(u, ()), t) for u, t in zip(before, tree.tokens, strict=True)
                ]),
            }  # fmt: skip
            for name, values in row.items():
                columns.setdefault(name, []).append(values.astype(np.float32))
            reached, followed = labels(candidate, future)
            parents.append(tree.parents)
            tested.append(reached)
            taken.append(followed)
            sizes.append(len(tree))
        lengths.append(len(trajectory.output_ids) - 1)
    return Nodes(
        np.cumsum(sizes), np.cumsum(lengths), np.concatenate(parents), np.concatenate(tested),
        np.concatenate(taken), {name: np.concatenate(c) for name, c in columns.items()},
    )  # fmt: skip


def learn_table(answers: Sequence[Answer]) -> Table:
    """The table as finished answers leave it."""
    table: Table = {}
    for answer in answers:
        inputs = [int(answer.trajectory.prompt_ids[-1]), *answer.trajectory.output_ids.tolist()]
        table |= {u: list(ids) for u, ids in zip(inputs, answer.top_ids, strict=False)}
    return table


def _rank(tokens: Sequence[int], token: int) -> int:
    return list(tokens).index(token) if token in tokens else NO_RANK


def _grown(candidate: CandidateTree, pending: int, table: Table, max_depth: int) -> CandidateTree:
    """The tree, cut to make room, with successors from the table under its best nodes."""
    size = min(len(candidate), MAX_NODES - GROWN_NODES)
    tokens, parents = candidate.tree.tokens[:size].tolist(), candidate.tree.parents[:size].tolist()
    depths = candidate.evidence.depth[:size].tolist()
    children = set(zip(parents, tokens, strict=True))
    node = -1
    while node < len(tokens) and len(tokens) < min(MAX_NODES, size + GROWN_NODES):
        depth = 1 if node < 0 else depths[node] + 1
        for token in table.get(pending if node < 0 else tokens[node], ())[:TABLE_WIDTH]:
            if (node, token) not in children and depth <= max_depth and len(tokens) < MAX_NODES:
                children.add((node, token))
                tokens.append(token)
                parents.append(node)
                depths.append(depth)
        node += 1
    added = len(tokens) - size
    old = {name: field[:size] for name, field in candidate.evidence._asdict().items()}
    blank = {name: np.zeros(added, f.dtype) for name, f in old.items()}
    blank |= {"own_share": np.full(added, np.nan, np.float32),
              "depth": np.array(depths[size:], np.int32)}  # fmt: skip
    evidence = Evidence(**{name: np.concatenate([f, blank[name]]) for name, f in old.items()})
    return CandidateTree(DraftTree.from_lists(tokens, parents), evidence)


# -- ways to value --------------------------------------------------------------------------------

EDGES: dict[str, NDArray[np.float64]] = {
    "frequency": ev.SHARE_EDGES,
    "share": ev.SHARE_EDGES,
    "own_share": ev.OWN_SHARE_EDGES,
    "count": ev.COUNT_EDGES,
    "length": ev.LENGTH_EDGES,
    "depth": ev.DEPTH_EDGES,
    "sources": np.arange(1.0, 8.0),
    "similarity": np.array([0.5, 0.6, 0.7, 0.8, 0.9]),
    "last_rank": np.array([1.0, 2.0, 4.0, 8.0, NO_RANK]),
    "table_rank": np.array([1.0, 2.0, 4.0, 8.0, NO_RANK]),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Signature by buckets of `axes`, the most telling first; or a feature taken as the rate."""

    axes: tuple[str, ...] = ()
    rate: str = ""
    fixed_tau: bool = False
    """Keep what is worth tau, whatever it costs; else best-first against dc/dn."""

    def rates(self, nodes: Nodes, counted: Nodes, labelled: NDArray[np.bool_]) -> FloatArray:
        """Rate of each of `nodes`, from the edges of `counted` that are `labelled`."""
        if self.rate:
            return nodes.features[self.rate]
        shape = [len(EDGES[axis]) + 1 for axis in self.axes]
        size = int(np.prod(shape))
        codes = self._codes(counted, shape)
        seen = np.bincount(codes[labelled & counted.tested], minlength=size).reshape(shape)
        taken = np.bincount(codes[labelled & counted.taken], minlength=size).reshape(shape)
        return smoothed(seen, taken).ravel()[self._codes(nodes, shape)]

    def _codes(self, nodes: Nodes, shape: list[int]) -> IntArray:
        buckets = [
            np.searchsorted(EDGES[axis], nodes.features[axis], side="right") for axis in self.axes
        ]
        return np.ravel_multi_index(buckets, shape)


@dataclass(frozen=True, slots=True)
class Outcome:
    speedup: float
    acceptance_length: float
    nodes_per_step: float
    quality: Reliability | None = None


def try_out(variant: Variant, calibration: Nodes, test: Nodes, cost: CostStaircase) -> Outcome:
    """Count, price and choose tau on the calibration part as `calibrate` does; decode the test."""
    table = cost.table(MAX_NODES + 1)
    free = np.zeros(MAX_NODES + 1)
    prices = free if variant.fixed_tau else (table - table[0]) / table[0]
    tau = 0.02 if variant.fixed_tau else 0.0
    labelled = np.ones(len(calibration.parents), bool)
    for _ in range(ROUNDS):
        rates = variant.rates(calibration, calibration, labelled)
        positions, kept, _ = calibration.run(rates, tau, prices)
        labelled = calibration.offered(positions)
        if not variant.fixed_tau:
            prices = calibration.speed(kept, cost) * (table - table[0])
    rates = variant.rates(calibration, calibration, labelled)
    tau = max(
        FIXED_TAUS if variant.fixed_tau else TAUS,
        key=lambda t: calibration.speed(calibration.run(rates, t, prices)[1], cost),
    )
    return decode(test, variant.rates(test, calibration, labelled), tau, prices, cost)


def decode(
    nodes: Nodes, rates: FloatArray, tau: float, prices: FloatArray, cost: CostStaircase
) -> Outcome:
    positions, kept, accepted = nodes.run(rates, tau, prices)
    offered = nodes.offered(positions)
    every = np.arange(len(rates))
    value = path_products(every, nodes.parents, nodes.first_node, rates.astype(np.float32))
    return Outcome(
        nodes.speed(kept, cost) * cost.seconds[0],
        1 + float(accepted.mean()),
        float(kept.mean()),
        score(value[offered], nodes.taken[offered]),
    )


def bounds(nodes: Nodes, cost: CostStaircase) -> dict[str, Outcome]:
    """Whole trees, and only the nodes the target accepts."""
    free = np.zeros(MAX_NODES + 1)
    known = nodes.taken.astype(float)
    both = {
        "unfiltered": decode(nodes, np.ones(len(known)), 0.0, free, cost),
        "oracle": decode(nodes, known, 0.5, free, cost),
    }
    return {name: replace(outcome, quality=None) for name, outcome in both.items()}
