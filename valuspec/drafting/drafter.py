"""Draft sources of a replica and of each request, behind one call per step: `propose`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from valuspec.drafting.candidates import CandidateBuilder
from valuspec.drafting.suffix import (
    CONTEXT,
    GRAMS,
    MAX_HITS,
    MAX_MATCH,
    Continuations,
    SuffixIndex,
)
from valuspec.evidence import CandidateTree, Source
from valuspec.tree import DraftTree

MAX_DEPTH = 15
"""Deepest draft. The engine's exact attention reads 16 tokens along a path, the root included."""
MAX_ROWS = len(Source) * len(GRAMS) * MAX_HITS
PROMPT_TAIL = 4
"""Prompt tokens before a retrieved answer: about a chat template's opening of the answer."""

IntArray = NDArray[np.int32]
TokenIds = Sequence[int] | IntArray


class Drafter:
    """Draft sources of one replica: a store of recent answers, and sessions that search it.

    One token budget serves all namespaces; the oldest tokens go first, whoever wrote them. A
    session sees answers of its own namespace only. Not thread-safe: the engine's thread owns it.

    shared_tokens:    budget of the store, 76 bytes each
    retrieved_tokens: budget of one session's retrieved trees
    """

    def __init__(self, *, shared_tokens: int = 1 << 18, retrieved_tokens: int = 1 << 14) -> None:
        self._shared = SuffixIndex(shared_tokens)
        self._retrieved_tokens = retrieved_tokens
        self._owners: dict[str, int] = {}
        self._builder = CandidateBuilder()
        self._found = Continuations.allocate(MAX_ROWS, MAX_DEPTH)

    def start(self, namespace: str, prompt_ids: TokenIds) -> DraftSession:
        """Open the draft session of one request."""
        return DraftSession(self, self._owner(namespace), prompt_ids)

    def remember(self, namespace: str, prompt_ids: TokenIds, output_ids: TokenIds) -> None:
        """Add a finished answer to the shared store, the end of its prompt as context."""
        prompt = np.asarray(prompt_ids[-CONTEXT:], np.int32)
        owner = self._owner(namespace)
        self._shared.append(prompt, 0, owner)
        self._shared.append(np.asarray(output_ids, np.int32), 1, owner)
        self._shared.end_document(owner)

    def remember_tree(self, namespace: str, tree: DraftTree) -> None:
        """Add what was answered to one prompt, as a tree, to the shared store."""
        owner = self._owner(namespace)
        for nodes, weights in _documents(tree):
            self._shared.append(tree.tokens[nodes], weights, owner)
            self._shared.end_document(owner)

    def _owner(self, namespace: str) -> int:
        return self._owners.setdefault(namespace, len(self._owners))


class DraftSession:
    """Draft sources of one request: its own text, the trees retrieved for it, the shared store."""

    def __init__(self, drafter: Drafter, owner: int, prompt_ids: TokenIds) -> None:
        prompt = np.asarray(prompt_ids, np.int32)
        self._drafter = drafter
        self._owner = owner
        self._own = SuffixIndex(len(prompt) + 4096)
        self._retrieved: SuffixIndex | None = None
        self._opening = prompt[-PROMPT_TAIL:]
        self._tail = prompt[:0]
        self._length = 0
        self._extend(prompt)

    def extend(self, token_ids: TokenIds) -> None:
        """Append the tokens the target has produced."""
        self._extend(np.asarray(token_ids, np.int32))

    def _extend(self, tokens: IntArray) -> None:
        self._own.append(tokens)
        self._tail = np.concatenate((self._tail, tokens[-CONTEXT:]))[-CONTEXT:]
        self._length += len(tokens)

    def add_retrieved(self, trees: Iterable[DraftTree]) -> None:
        """Search these trees too, the most similar first; each hangs off a prompt like this one.

        A tree becomes one document per leaf. A branch repeats up to MAX_MATCH tokens before its
        branching point, with weight 0, so that contexts match there and nothing counts twice.
        """
        if self._retrieved is None:
            self._retrieved = SuffixIndex(self._drafter._retrieved_tokens)
        # Searches see the latest first and eviction takes the oldest: the most similar come last.
        for tree in reversed(list(trees)):
            for nodes, weights in _documents(tree):
                if tree.parents[nodes[0]] < 0:
                    self._retrieved.append(self._opening, 0)
                self._retrieved.append(tree.tokens[nodes], weights)
                self._retrieved.end_document()

    def propose(self, max_nodes: int = 64, max_depth: int = MAX_DEPTH) -> CandidateTree:
        """Candidate tree for the next step; empty when the context's end is new."""
        drafter, found = self._drafter, self._drafter._found
        rows = self._own.search(self._tail, found, 0, Source.OWN.value)
        if self._retrieved is not None:
            rows = self._retrieved.search(self._tail, found, rows, Source.RETRIEVED.value)
        rows = drafter._shared.search(self._tail, found, rows, Source.SHARED.value, self._owner)
        depth = min(max_depth, MAX_DEPTH)
        return drafter._builder.build(found, rows, max_nodes, depth, self._length)


def _documents(tree: DraftTree) -> Iterator[tuple[IntArray, IntArray]]:
    """(node indices in order, weights) of each leaf's document; takes O(nodes + leaves)."""
    parents = tree.parents.tolist()
    inner = set(parents)
    seen = bytearray(len(parents))
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        nodes, node = [], leaf
        while node >= 0 and not seen[node]:
            seen[node] = True
            nodes.append(node)
            node = parents[node]
        fresh = len(nodes)
        while node >= 0 and len(nodes) < fresh + MAX_MATCH:
            nodes.append(node)
            node = parents[node]
        order = np.array(nodes[::-1], np.int32)
        weights = tree.counts[order]
        weights[: len(nodes) - fresh] = 0
        yield order, weights
