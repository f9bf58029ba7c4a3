"""Candidate trees at every output position of known trajectories: drafted once, replayed often.

What is offered at a position depends on the tokens before it alone, as long as the shared store
stays as it is. So a calibration, which decodes the same trajectories dozens of times, drafts each
position once; what remains of a replay is to value, to keep and to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from valuspec.cost import CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.evidence import NUM_CODES, CandidateTree, signatures
from valuspec.replay import MAX_NODES, Trajectory, labels, offers
from valuspec.thresholds import ThresholdSet
from valuspec.valuation import path_products, walk

IntArray = NDArray[np.int64]
Offer = tuple[CandidateTree, NDArray[np.int32]]
"""A candidate tree, and what the target goes on with where it was offered."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The steps of decoding all trajectories with one choice of nodes, in order."""

    positions: IntArray
    """Where each step begins, int64 [num_steps]."""
    kept: IntArray
    """Nodes it verifies."""
    accepted: IntArray
    """Nodes the target accepts."""
    contexts: IntArray
    """Tokens before it."""
    num_tokens: int
    """Output tokens in all, those of prefill not counted."""
    draft_s: float = 0.0
    """Seconds it takes a draft head to draft for a step."""

    def tok_s(self, cost: CostStaircase) -> float:
        """Tokens per second of one request at this verify cost."""
        seconds = float(cost.table(MAX_NODES + 1)[self.kept].sum())
        seconds += float(cost.extra(1 + self.kept, self.contexts).sum())
        seconds += (cost.drafting + self.draft_s) * len(self.kept)
        return self.num_tokens / seconds if seconds else 0.0


class Drafted:
    """Arrays over all nodes of all positions, position after position, answer after answer."""

    def __init__(self, trajectories: Sequence[Trajectory], drafter: Drafter) -> None:
        """Draft everything; the trajectories must not be in the drafter's store."""
        self._lay_out(offers(t, drafter, max_nodes=MAX_NODES) for t in trajectories)

    @classmethod
    def of_offers(cls, trajectories: Iterable[Iterable[Offer]], *, draft_s: float = 0.0) -> Drafted:
        """Of candidate trees from anywhere: per answer, one for each output position after the
        first, with what the target goes on with there. `draft_s`: seconds to make one."""
        drafted = cls.__new__(cls)
        drafted._lay_out(trajectories, draft_s)
        return drafted

    def _lay_out(self, trajectories: Iterable[Iterable[Offer]], draft_s: float = 0.0) -> None:
        codes, parents, tested, taken, contexts = [], [], [], [], []
        sizes, lengths = [0], []
        for offered in trajectories:
            length = 0
            for candidate, future in offered:
                reached, followed = labels(candidate, future)
                codes.append(signatures(candidate.evidence).astype(np.uint16))
                parents.append(candidate.tree.parents.astype(np.int16))
                tested.append(reached)
                taken.append(followed)
                sizes.append(len(candidate))
                contexts.append(candidate.context)
                length += 1
            lengths.append(length)
        self._draft_s = draft_s
        self._codes = np.concatenate([np.empty(0, np.uint16), *codes])
        self._parents = np.concatenate([np.empty(0, np.int16), *parents])
        self._tested = np.concatenate([np.empty(0, bool), *tested])
        self._taken = np.concatenate([np.empty(0, bool), *taken])
        self._contexts = np.array(contexts, np.int64)
        self._first_node = np.cumsum(sizes)
        self._ends = np.cumsum(np.asarray(lengths, np.int64))

    def walk(self, thresholds: ThresholdSet | None, *, batch_size: int = 1) -> Walk:
        """Decode with what the thresholds keep, or with whole candidate trees."""
        if thresholds is None:
            rates, tau, prices = np.ones(NUM_CODES, np.float32), 0.0, np.zeros(MAX_NODES + 1)
            scales = slopes = np.zeros(len(self._contexts))
        else:
            index = thresholds.bucket_index(batch_size)
            rates, tau = thresholds.rates, thresholds.buckets[index].tau
            prices = thresholds.prices[index]
            scales, slopes = thresholds.prices_behind(index, self._contexts)
        steps = walk(self._codes, self._parents, self._taken, self._first_node, self._ends,
                     rates, tau, prices, scales, slopes, MAX_NODES)  # fmt: skip
        num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        contexts = self._contexts[steps[0]]
        return Walk(*steps, contexts, num_tokens=num_tokens, draft_s=self._draft_s)

    def transfers(self, walk: Walk) -> tuple[IntArray, IntArray]:
        """(edges put to the test, edges taken) by signature, int64 [NUM_CODES] each."""
        offered = self._offered(walk)
        seen = np.bincount(self._codes[offered & self._tested], minlength=NUM_CODES)
        taken = np.bincount(self._codes[offered & self._taken], minlength=NUM_CODES)
        return seen.astype(np.int64), taken.astype(np.int64)

    def outcomes(
        self, walk: Walk, thresholds: ThresholdSet
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """(value, whether the target went there) of every node offered."""
        offered = self._offered(walk)
        values = path_products(self._codes, self._parents, self._first_node, thresholds.rates)
        return values[offered], self._taken[offered]

    def _offered(self, walk: Walk) -> NDArray[np.bool_]:
        """Which nodes belong to the positions at which a step begins, bool [num_nodes]."""
        begins = np.zeros(len(self._first_node) - 1, bool)
        begins[walk.positions] = True
        return np.repeat(begins, np.diff(self._first_node))
