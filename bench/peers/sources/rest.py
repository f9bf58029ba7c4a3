"""REST's retrieval (He et al. 2023), from its description, with its published settings.

The context's last 16 tokens are looked for among earlier conversations, then its last 15, and so
on down to 2; the first length that occurs counts. What followed, 10 tokens each of at most 5000
places, goes into a trie, and its 64 most frequent prefixes are the draft tree. As a chain: the
most frequent token at each step. A miss drafts nothing here, which is kinder than the original.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.peers.sources.session import PeerDrafter, fitted
from valuspec.drafting.drafter import TokenIds
from valuspec.tree import DraftTree

LONGEST, SHORTEST = 16, 2
MATCHES = 5000
CONTINUATION = 10
CHOICES = 64
SEPARATOR = -1

IntArray = NDArray[np.int64]


class RestDrafter(PeerDrafter):
    def __init__(self, *, tree: bool) -> None:
        super().__init__()
        self._tree = tree
        self._documents: list[IntArray] = [np.full(LONGEST, SEPARATOR, np.int64)]
        self._index: _Index | None = None

    def remember(self, namespace: str, prompt_ids: TokenIds, output_ids: TokenIds) -> None:
        gap = np.full(CONTINUATION, SEPARATOR, np.int64)
        parts = [np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64), gap]
        self._documents.append(np.concatenate(parts))
        self._index = None  # built anew when next asked

    def look_up(self, prompt_ids: Sequence[int]) -> RestLookup:
        return RestLookup(self, prompt_ids)

    def draft(self, context: Sequence[int], max_nodes: int, max_depth: int) -> DraftTree:
        if self._index is None:
            self._index = _Index(np.concatenate(self._documents))
        found = self._index.continuations(context)
        tokens, parents, counts = prefixes(found)
        kept = most_frequent(counts, CHOICES) if self._tree else chain(parents, counts)
        return fitted(DraftTree.from_lists(tokens, parents, counts).select(kept),
                      max_nodes, max_depth)  # fmt: skip


class RestLookup:
    def __init__(self, drafter: RestDrafter, prompt_ids: Sequence[int]) -> None:
        self._drafter = drafter
        self._tail = list(prompt_ids[-LONGEST:])

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tail = [*self._tail, *token_ids][-LONGEST:]

    def draft(self, max_nodes: int, max_depth: int) -> DraftTree:
        return self._drafter.draft(self._tail, max_nodes, max_depth)


class _Index:
    """Places of token pairs, sorted by pair."""

    def __init__(self, tokens: IntArray) -> None:
        self._tokens = tokens
        self._pairs = tokens[:-1] * (1 << 32) + tokens[1:]
        self._order = np.argsort(self._pairs, kind="stable")
        self._sorted = self._pairs[self._order]

    def continuations(self, context: Sequence[int]) -> IntArray:
        """What followed the longest match, int [matches, CONTINUATION], padded with SEPARATOR."""
        if len(context) < SHORTEST:
            return np.empty((0, CONTINUATION), np.int64)
        pair = context[-2] * (1 << 32) + context[-1]
        first, last = np.searchsorted(self._sorted, [pair, pair + 1])
        ends = self._order[first:last] + 1  # place of the context's last token
        length = SHORTEST
        while length < min(LONGEST, len(context)) and len(ends):
            longer = ends[self._tokens[ends - length] == context[-length - 1]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        ends = ends[ends + CONTINUATION < len(self._tokens)][:MATCHES]
        found: IntArray = self._tokens[ends[:, None] + 1 + np.arange(CONTINUATION)]
        return found


def prefixes(found: IntArray) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and counts of the trie of the rows, parents first; a row ends at -1."""
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    node = np.full(len(found), -1, np.int64)
    for depth in range(found.shape[1]):
        alive = found[:, depth] != SEPARATOR
        found, node = found[alive], node[alive]
        if not len(found):
            break
        edges, inverse, count = np.unique(
            np.stack([node, found[:, depth]], 1), axis=0, return_inverse=True, return_counts=True
        )
        node = len(tokens) + inverse.reshape(-1)
        parents += edges[:, 0].tolist()
        tokens += edges[:, 1].tolist()
        counts += count.tolist()
    return tokens, parents, counts


def most_frequent(counts: Sequence[int], choices: int) -> IntArray:
    """The most frequent prefixes, ascending. None is without its own prefix: that is at least as
    frequent, and comes earlier."""
    return np.sort(np.argsort(-np.asarray(counts, np.int64), kind="stable")[:choices])


def chain(parents: Sequence[int], counts: Sequence[int]) -> IntArray:
    """From the context, the most frequent child, its most frequent child, and so on."""
    best: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent not in best or counts[node] > counts[best[parent]]:
            best[parent] = node
    path, node = [], -1
    while node in best:
        node = best[node]
        path.append(node)
    return np.array(path, np.int64)
