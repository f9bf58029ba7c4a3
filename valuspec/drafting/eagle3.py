"""What a draft head proposes, alone or together with what occurred before.

Two trees are merged into one: an edge that both propose has the evidence of both. Of an edge that
only occurred, the head's silence is evidence as well, where it was asked what follows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec.evidence import CandidateTree, Evidence
from valuspec.tree import DraftTree

UNLISTED = 99
"""Rank of a token that is not among those the head listed."""


class HeadDraft(NamedTuple):
    """A tree, and what a draft head thought of its edges.

    probability: float32 [num_nodes], given the parent
    rank:        int32 [num_nodes], tokens the head held likelier after the same parent
    """

    tree: DraftTree
    probability: NDArray[np.float32]
    rank: NDArray[np.int32]

    def candidate(self, context: int = 0) -> CandidateTree:
        """The head's tree alone, behind so many tokens."""
        evidence = Evidence.of_draft_model(self.tree, self.probability, self.rank)
        return CandidateTree(self.tree, evidence, context)


def merge(occurred: CandidateTree, draft: HeadDraft) -> CandidateTree:
    """One candidate tree of both; nodes that occurred come first."""
    if not len(occurred):
        return draft.candidate(occurred.context)
    old = occurred.tree
    tokens, parents = old.tokens.tolist(), old.parents.tolist()
    places = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    where = np.empty(len(draft.tree), np.int32)  # of the head's nodes in the merged tree
    drafted = zip(draft.tree.parents.tolist(), draft.tree.tokens.tolist(), strict=True)
    for node, (parent, token) in enumerate(drafted):
        edge = (int(where[parent]) if parent >= 0 else -1, token)
        if (place := places.get(edge)) is None:
            place = places[edge] = len(tokens)
            tokens.append(token)
            parents.append(edge[0])
        where[node] = place
    tree = DraftTree.from_lists(tokens, parents)
    tree.counts[: len(old)] = old.counts
    return CandidateTree(tree, _both(occurred.evidence, tree, draft, where), occurred.context)


def _both(
    occurred: Evidence, tree: DraftTree, draft: HeadDraft, where: NDArray[np.int32]
) -> Evidence:
    first_new, size = len(occurred.depth), len(tree)
    grown = Evidence(*(
        np.concatenate([field, np.zeros(size - first_new, field.dtype)]) for field in occurred
    ))  # fmt: skip
    # What followed a node, all occurrences together; the last entry is the context's.
    followed = np.zeros(size + 1, np.int32)
    followed[tree.parents[:first_new]] = occurred.parent_occurrences
    probability = np.full(size, np.nan, np.float32)
    asked = np.zeros(size + 1, bool)
    asked[np.where(draft.tree.parents >= 0, where[draft.tree.parents], -1)] = True
    probability[asked[tree.parents]] = 0.0
    rank = np.where(asked[tree.parents], UNLISTED, 0).astype(np.int32)
    probability[where], rank[where] = draft.probability, draft.rank
    own_share = grown.own_share.copy()
    own_share[first_new:] = np.nan
    return grown._replace(
        parent_occurrences=followed[tree.parents],
        depth=tree.depths(),
        own_share=own_share,
        probability=probability,
        rank=rank,
    )
