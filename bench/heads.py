"""Draft heads in the benches: their trees along known answers, and the fair baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from valuspec.calibration import calibrate_drafted
from valuspec.cost import CostStaircase
from valuspec.drafted import Drafted, Offer
from valuspec.drafting.drafter import Drafter
from valuspec.engine.head_offers import HeadOffers
from valuspec.engine.head_source import HeadChoice
from valuspec.engine.target import Target
from valuspec.evidence import CandidateTree
from valuspec.replay import IntArray, Select, Tally, Trajectory, labels
from valuspec.thresholds import ThresholdSet

SIZES = (2, 4, 6, 8, 12, 16, 24, 32)
TIMED = 2
"""Answers along which single drafts are timed."""


@dataclass(slots=True)
class HeadReplay:
    """Decodes known answers with the trees of a head; what a draft takes is part of a step."""

    target: Target
    choice: HeadChoice
    drafter: Drafter
    draft_s: float = 0.0

    def offers(self, trajectories: Sequence[Trajectory]) -> list[list[Offer]]:
        """Candidate trees at every position; the first call times single drafts as well."""
        if not self.draft_s:
            list(HeadOffers(self.target, self.choice, self.drafter).along(trajectories[:1]))
            timed = HeadOffers(self.target, self.choice, self.drafter)  # now that all is compiled
            for trajectory in trajectories[:TIMED]:
                list(timed.along([trajectory]))
            self.draft_s = timed.draft_s
        return list(HeadOffers(self.target, self.choice, self.drafter).along(trajectories))

    def calibrate(
        self, offers: Sequence[list[Offer]], costs: Mapping[int, CostStaircase]
    ) -> ThresholdSet:
        return calibrate_drafted(
            Drafted.of_offers(offers, draft_s=self.draft_s),
            costs,
            model_fingerprint=self.target.model_fingerprint,
            provenance={"made_by": "bench.speed", "draft": self.choice.draft},
        )

    def tally(
        self, offers: Sequence[list[Offer]], select: Select, cost: CostStaircase, *, plain: bool
    ) -> Tally:
        """Decode with what `select` keeps; `plain` decoding asks for no drafts."""
        seconds = cost.table(1024) + (0.0 if plain else cost.drafting + self.draft_s)
        tally = Tally()
        for offered in offers:
            done = 0
            while done < len(offered):
                candidate, future = offered[done]
                kept = select(candidate, future)
                taken = labels(candidate, future)[1]
                accepted = int(taken[kept].sum())
                tally.num_steps += 1
                tally.num_accepted_tokens += accepted
                tally.num_draft_tokens += len(kept)
                tally.num_offered_nodes += len(candidate)
                tally.num_tokens += min(accepted + 1, len(future))
                tally.seconds += seconds[len(kept)]
                tally.seconds += cost.extra(1 + len(kept), candidate.context)
                done += accepted + 1
        return tally

    def best_size(self, offers: Sequence[list[Offer]], cost: CostStaircase) -> Select:
        """The fixed number of nodes that is fastest on these answers."""
        choices = [likeliest(size) for size in SIZES]
        return max(choices, key=lambda c: self.tally(offers, c, cost, plain=False).tok_s)


def likeliest(size: int) -> Select:
    """Keep the `size` nodes of highest path product of what each edge's source says."""

    def select(candidate: CandidateTree, future: IntArray) -> IntArray:
        evidence = candidate.evidence
        frequency = evidence.occurrences / np.maximum(evidence.parent_occurrences, 1)
        rate = np.fmax(evidence.probability, frequency).astype(np.float64)
        for node, parent in enumerate(candidate.tree.parents.tolist()):
            if parent >= 0:
                rate[node] *= rate[parent]
        return np.sort(np.argsort(-rate, kind="stable")[:size]).astype(np.int32)

    return select


def load(target: Target, draft: str, folder: Path) -> HeadChoice | None:
    """The head for a bench's `--draft`; None for retrieval alone."""
    if draft == "retrieval":
        return None
    return HeadChoice.on_cpu(target.load_head(folder), "eagle3" if draft == "eagle3" else "hybrid")
