"""What is known of the edges of a candidate tree before the target is asked, and its signature.

An edge u→v is the claim that the target, having produced u, goes on to v. Its evidence is put
into coarse buckets; edges with equal buckets share a signature, an integer code, and with it a
transfer rate. Edges proposed by a draft model carry a probability instead of occurrences and
have signatures of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec.jit import kernel
from valuspec.tree import DraftTree

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class Source(IntFlag):
    """Where an edge was seen; edges seen in several places combine them."""

    OWN = 1
    """In the request's own prompt and output."""
    RETRIEVED = 2
    """In draft trees of similar earlier requests."""
    SHARED = 4
    """In the store of recent answers that all requests of the namespace share."""


class Evidence(NamedTuple):
    """One entry per node v of a candidate tree, for the edge u→v from its parent (or the context).

    An occurrence is an earlier place where the context's end was seen; its match length is the
    number of equal tokens before the draft begins. It is closer the longer the match, and the more
    tokens of the passage before agree.
    """

    sources: IntArray
    """`Source` bits of the occurrences that go on to v; 0 for a draft model's edge."""
    match_length: IntArray
    """Longest match among the occurrences that go on to v, in tokens."""
    occurrences: IntArray
    """How often the target went on to v in the occurrences found."""
    parent_occurrences: IntArray
    """The same for all children of u."""
    depth: IntArray
    """1 for children of the context."""
    share: FloatArray
    """Share of v among u's continuations, closer occurrences weighing more; 0 to 1."""
    own_share: FloatArray
    """The same within the request's own text; NaN where it does not go on from u."""
    probability: FloatArray
    """Draft model's conditional probability of v; 0 where it went on from u, but not to v; NaN
    where it was not asked."""
    rank: IntArray
    """Tokens the draft model held likelier than v after u; 0 where it was not asked."""

    @classmethod
    def of_tree(cls, tree: DraftTree, match_length: int = 16) -> Evidence:
        """Evidence of a stored tree alone, taken for retrieved and for matched this far."""
        total = np.zeros(len(tree) + 1, np.int64)  # last entry serves parent -1
        np.add.at(total, tree.parents, tree.counts)
        total = total[tree.parents]
        none = np.full(len(tree), np.nan, np.float32)
        return cls(
            sources=np.full(len(tree), int(Source.RETRIEVED), np.int32),
            match_length=np.full(len(tree), match_length, np.int32),
            occurrences=tree.counts,
            parent_occurrences=np.minimum(total, np.iinfo(np.int32).max).astype(np.int32),
            depth=tree.depths(),
            share=(tree.counts / total).astype(np.float32),
            own_share=none,
            probability=none,
            rank=np.zeros(len(tree), np.int32),
        )

    @classmethod
    def of_draft_model(
        cls, tree: DraftTree, probability: FloatArray, rank: IntArray | None = None
    ) -> Evidence:
        """Evidence of a tree drafted by a model: `probability` [num_nodes] given the parent."""
        zeros = np.zeros(len(tree), np.int32)
        return cls(
            sources=zeros,
            match_length=zeros,
            occurrences=zeros,
            parent_occurrences=zeros,
            depth=tree.depths(),
            share=zeros.astype(np.float32),
            own_share=np.full(len(tree), np.nan, np.float32),
            probability=np.asarray(probability, np.float32),
            rank=zeros if rank is None else np.asarray(rank, np.int32),
        )


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """What the draft sources supply for one step, before valuation."""

    tree: DraftTree
    evidence: Evidence
    context: int = 0
    """Tokens before it: what a forward costs depends on them."""

    def __len__(self) -> int:
        return len(self.tree.tokens)


# Bucket edges: bucket b holds values from EDGES[b - 1] (inclusive) to EDGES[b] (exclusive).
SHARE_EDGES = np.array([0.01, 0.03, 0.07, 0.15, 0.3, 0.45, 0.6, 0.75, 0.88, 0.96, 0.9999])
OWN_SHARE_EDGES = np.array([0.0, 0.001, 0.05, 0.2, 0.5, 0.8, 0.9999])  # bucket 0: no own text
COUNT_EDGES = np.array([2, 4, 8, 16])
LENGTH_EDGES = np.array([2, 4, 8, 16])
DEPTH_EDGES = np.array([2, 3, 5, 9])
PROBABILITY_EDGES = np.array([0.01, 0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99])
RANK_EDGES = np.array([1, 2, 4])
AGREEMENT_EDGES = np.array([0.001, 0.15, 0.45, 0.75])  # of the share; bucket 0: u never occurred

SHAPE = (
    len(SHARE_EDGES) + 1,
    len(OWN_SHARE_EDGES) + 1,
    len(COUNT_EDGES) + 1,
    len(LENGTH_EDGES) + 1,
)
"""Buckets of an occurrence edge, the most telling first: rates back off from the right.

Depth, sources and whether a longer match disagrees were tried as well and did not foretell
acceptance better on held-out answers: what they say is in the shares already.
"""
DRAFT_MODEL_SHAPE = (
    len(PROBABILITY_EDGES) + 1,
    len(AGREEMENT_EDGES) + 2,
    len(RANK_EDGES) + 1,
    len(DEPTH_EDGES) + 1,
)
"""Buckets of an edge that a draft model was asked about; occurrences may speak for it as well."""
NUM_OCCURRENCE_CODES = int(np.prod(SHAPE))
NUM_CODES = NUM_OCCURRENCE_CODES + int(np.prod(DRAFT_MODEL_SHAPE))


def signatures(evidence: Evidence) -> IntArray:
    """Code of each edge, int32 [num_nodes] in [0, NUM_CODES)."""
    codes = np.empty(len(evidence.depth), np.int32)
    _signatures(evidence, codes)
    return codes


@kernel
def _signatures(evidence: Evidence, codes: IntArray) -> None:
    for i in range(codes.size):
        probability = evidence.probability[i]
        if not np.isnan(probability):
            code = _bucket(PROBABILITY_EDGES, probability) * DRAFT_MODEL_SHAPE[1]
            if evidence.parent_occurrences[i] > 0:
                code += 1 + _bucket(AGREEMENT_EDGES, evidence.share[i])
            code = code * DRAFT_MODEL_SHAPE[2] + _bucket(RANK_EDGES, evidence.rank[i])
            code = code * DRAFT_MODEL_SHAPE[3] + _bucket(DEPTH_EDGES, evidence.depth[i])
            codes[i] = NUM_OCCURRENCE_CODES + code
            continue
        code = _bucket(SHARE_EDGES, evidence.share[i])
        code = code * SHAPE[1] + _bucket(OWN_SHARE_EDGES, evidence.own_share[i])
        code = code * SHAPE[2] + _bucket(COUNT_EDGES, evidence.parent_occurrences[i])
        codes[i] = code * SHAPE[3] + _bucket(LENGTH_EDGES, evidence.match_length[i])


@kernel
def _bucket(edges: NDArray[np.float64], value: float) -> int:
    bucket = 0  # also of NaN, which is below every edge
    while bucket < edges.size and value >= edges[bucket]:
        bucket += 1
    return bucket
