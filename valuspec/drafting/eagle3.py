"""What a draft head proposes, alone or together with what occurred before.

Two trees are merged into one: an edge that both propose has the evidence of both. Of an edge that
only occurred, the head's silence is evidence as well, where it was asked what follows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec.evidence import CandidateTree, Evidence
from valuspec.jit import kernel
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
    most = len(occurred) + len(draft.tree)
    tree = DraftTree(*(np.ones(most, np.int32) for _ in range(3)))
    evidence = Evidence._make(np.empty(most, field.dtype) for field in occurred.evidence)
    size = _merge(
        (occurred.tree.tokens, occurred.tree.parents, occurred.tree.counts), occurred.evidence,
        (draft.tree.tokens, draft.tree.parents), draft.probability, draft.rank,
        (tree.tokens, tree.parents, tree.counts), evidence,
    )  # fmt: skip
    tree = DraftTree(tree.tokens[:size], tree.parents[:size], tree.counts[:size])
    return CandidateTree(tree, Evidence._make(field[:size] for field in evidence), occurred.context)


@kernel
def _merge(
    old: Any, occurred: Evidence, drafted: Any, probability: Any, rank: Any,
    merged: Any, evidence: Evidence,
) -> Any:  # fmt: skip
    """Fill `merged` (tokens, parents, counts of one) and `evidence`; how many nodes they have."""
    tokens, parents, counts = merged
    size = old[0].size
    tokens[:size], parents[:size], counts[:size] = old[0], old[1], old[2]
    evidence.sources[:size], evidence.sources[size:] = occurred.sources, 0
    evidence.match_length[:size], evidence.match_length[size:] = occurred.match_length, 0
    evidence.occurrences[:size], evidence.occurrences[size:] = occurred.occurrences, 0
    evidence.share[:size], evidence.share[size:] = occurred.share, 0
    evidence.own_share[:size], evidence.own_share[size:] = occurred.own_share, np.nan
    # What followed a node, all occurrences together, and whether the head was asked: by parent + 1.
    followed = np.zeros(tokens.size + 1, np.int32)
    asked = np.zeros(tokens.size + 1, np.bool_)
    for node in range(size):
        followed[parents[node] + 1] = occurred.parent_occurrences[node]
    where = np.empty(drafted[0].size, np.int32)  # of the head's nodes in the merged tree
    for node in range(drafted[0].size):
        token, parent = drafted[0][node], drafted[1][node]
        parent = where[parent] if parent >= 0 else np.int32(-1)
        place = 0
        while place < size and not (tokens[place] == token and parents[place] == parent):
            place += 1
        if place == size:
            tokens[place], parents[place] = token, parent
            size += 1
        where[node] = place
        asked[parent + 1] = True
    for node in range(size):
        parent = parents[node]
        evidence.parent_occurrences[node] = followed[parent + 1]
        evidence.depth[node] = evidence.depth[parent] + 1 if parent >= 0 else 1
        evidence.probability[node] = 0.0 if asked[parent + 1] else np.nan
        evidence.rank[node] = UNLISTED if asked[parent + 1] else 0
    for node in range(where.size):
        evidence.probability[where[node]] = probability[node]
        evidence.rank[where[node]] = rank[node]
    return size
