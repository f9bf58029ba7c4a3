"""Serve known answers again, without a model: what each way of choosing nodes would have done.

Requests come in their order, each meeting the stores that the requests before it left behind, as
on a replica. What is recorded does not depend on the verify cost, so any cost staircase can be
applied afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from jobs.history import SimulatedRetrieval, vocab_size
from valuspec import valuation
from valuspec.cost import CONTEXT, CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.replay import MAX_NODES, Select, Step, Trajectory, labels, steps
from valuspec.thresholds import ThresholdSet

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Counts by request; all arrays int64, first axis [num_requests]."""

    tokens: IntArray
    """Output tokens after the first, which comes from prefill."""
    accepted: IntArray
    offered: IntArray
    """Candidate nodes before a choice was made."""
    steps_by_nodes: IntArray
    """[num_requests, MAX_NODES + 1]: steps that verified so many nodes."""
    beyond: IntArray
    """Tokens of context beyond CONTEXT, summed over steps: `CostStaircase.extra`'s per_token."""
    keys_beyond: IntArray
    """The same, times the rows of the step."""
    plain_beyond: IntArray
    """The same over the steps of plain decoding, whose rows are one each."""

    @classmethod
    def zeros(cls, num_requests: int) -> Replayed:
        return cls(
            np.zeros(num_requests, np.int64),
            np.zeros(num_requests, np.int64),
            np.zeros(num_requests, np.int64),
            np.zeros((num_requests, MAX_NODES + 1), np.int64),
            *(np.zeros(num_requests, np.int64) for _ in range(3)),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Replayed]) -> Replayed:
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def count(self, request: int, step: Step) -> None:
        self.tokens[request] += step.num_tokens
        self.accepted[request] += step.num_accepted
        self.offered[request] += len(step.candidate)
        self.steps_by_nodes[request, len(step.kept)] += 1
        beyond = [
            max(0, step.candidate.context + ahead - CONTEXT) for ahead in range(step.num_tokens)
        ]
        self.beyond[request] += beyond[0]
        self.keys_beyond[request] += beyond[0] * (1 + len(step.kept))
        self.plain_beyond[request] += sum(beyond)

    def seconds(self, cost: CostStaircase) -> FloatArray:
        """Decode time by request, float64 [num_requests]."""
        seconds: FloatArray = self.steps_by_nodes @ (cost.table(MAX_NODES + 1) + cost.drafting)
        seconds += cost.per_token * self.beyond + cost.per_key * self.keys_beyond
        return seconds

    def plain_seconds(self, cost: CostStaircase) -> FloatArray:
        """Time of plain decoding by request, float64 [num_requests]."""
        each = cost.per_token + cost.per_key
        plain: FloatArray = self.tokens * cost.seconds[0] + each * self.plain_beyond
        return plain

    def speedup(self, cost: CostStaircase, weights: FloatArray | None = None) -> float:
        """Over plain decoding; weights [num_requests] count some requests more than others."""
        w = np.ones(len(self.tokens)) if weights is None else weights
        return float(w @ self.plain_seconds(cost) / (w @ self.seconds(cost)))

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + float(self.accepted.sum() / max(1, self.steps_by_nodes.sum()))

    @property
    def nodes_per_step(self) -> float:
        by_nodes = self.steps_by_nodes.sum(0)
        return float(by_nodes @ np.arange(MAX_NODES + 1) / max(1, by_nodes.sum()))

    @property
    def offered_per_step(self) -> float:
        return float(self.offered.sum() / max(1, self.steps_by_nodes.sum()))


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which requests to serve, and what the stores hold when the first one comes.

    known, queries: indices into the trajectories; `known` comes before `queries`
    live:           finished answers enter the stores; else these stay as they are
    num_trees:      draft trees retrieved per request; 0 is no retrieval
    """

    known: range
    queries: range
    live: bool = True
    num_trees: int = 16

    def shards(self, count: int) -> list[Scenario]:
        """Up to `count` scenarios that together give what this one gives, in order."""
        edges = np.linspace(self.queries.start, self.queries.stop, count + 1).astype(int).tolist()
        parts = [range(a, b) for a, b in pairwise(edges) if b > a]
        if not self.live:
            return [replace(self, queries=part) for part in parts]
        start = self.known.start
        return [replace(self, known=range(start, part.start), queries=part) for part in parts]


def simulate(
    trajectories: Sequence[Trajectory], scenario: Scenario, selects: Mapping[str, Select]
) -> dict[str, Replayed]:
    """Counts of each way of choosing, by its name."""
    result = {name: Replayed.zeros(len(scenario.queries)) for name in selects}
    for request, (trajectory, drafter) in enumerate(_served(trajectories, scenario)):
        for name, select in selects.items():
            for step in steps(trajectory, drafter, select, max_nodes=MAX_NODES):
                result[name].count(request, step)
    return result


@dataclass(frozen=True, slots=True)
class NodeRecords:
    """Every candidate node along the steps of a threshold set; arrays [num_nodes]."""

    value: NDArray[np.float32]
    taken: NDArray[np.bool_]
    """The target went on to it, kept or not."""
    kept: NDArray[np.bool_]
    depth: NDArray[np.int32]
    sources: NDArray[np.int32]
    """`Source` bits."""

    @classmethod
    def concatenate(cls, parts: Sequence[NodeRecords]) -> NodeRecords:
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))


def examine(
    trajectories: Sequence[Trajectory], scenario: Scenario, thresholds: ThresholdSet, select: Select
) -> NodeRecords:
    """What became of each candidate node, were `thresholds` in use through `select`."""
    none = np.empty(0, np.int32)
    parts = [NodeRecords(none.astype(np.float32), none.astype(bool), none.astype(bool), none, none)]
    for trajectory, drafter in _served(trajectories, scenario):
        for step in steps(trajectory, drafter, select, max_nodes=MAX_NODES):
            evidence = step.candidate.evidence
            kept = np.zeros(len(step.candidate), bool)
            kept[step.kept] = True
            parts.append(
                NodeRecords(
                    valuation.values(step.candidate, thresholds),
                    labels(step.candidate, step.future)[1],
                    kept,
                    evidence.depth,
                    evidence.sources,
                )
            )
    return NodeRecords.concatenate(parts)


def _served(
    trajectories: Sequence[Trajectory], scenario: Scenario
) -> Iterator[tuple[Trajectory, Drafter]]:
    """Each query with its retrieved trees, and the drafter as it finds it."""
    drafter = Drafter()
    size = vocab_size(trajectories[i] for i in (*scenario.known, *scenario.queries))
    with SimulatedRetrieval(vocab_size=size) if scenario.num_trees else nullcontext() as retrieval:

        def learn(trajectory: Trajectory) -> None:
            drafter.remember(trajectory.namespace, trajectory.prompt_ids, trajectory.output_ids)
            if retrieval is not None:
                retrieval.add(trajectory)

        for i in scenario.known:
            learn(trajectories[i])
        for i in scenario.queries:
            trajectory = trajectories[i]
            if retrieval is not None:
                trees = retrieval.lookup(trajectory, scenario.num_trees)
                trajectory = replace(trajectory, retrieved=trees)
            yield trajectory, drafter
            if scenario.live:
                learn(trajectory)
