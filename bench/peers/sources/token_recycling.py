"""Token Recycling (Luo et al. 2024), from its paper, with the tree that its authors use.

A matrix holds, for each token of the vocabulary, the 8 tokens the target last held likeliest
behind it. Every verified row refreshes the row of its token, rejected drafts included. A draft is
the fixed tree of 80 nodes filled in from the matrix, beginning at the pending token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.answers import top_ids
from bench.peers.sources.session import PeerDrafter, fitted
from valuspec.drafting.drafter import TokenIds
from valuspec.engine import proposal
from valuspec.engine.kv_cache import KvCache
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.replay import Trajectory
from valuspec.tree import DraftTree

WIDTH = 8
UNKNOWN = -1
CHILDREN = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
)
"""The authors' tree: by level, children of each node from the left; the likeliest come first."""


def template() -> list[tuple[int, int]]:
    """(parent, rank among the parent's successors) of each node, level by level."""
    nodes: list[tuple[int, int]] = []
    level = [-1]
    for widths in CHILDREN:
        first = len(nodes)
        nodes += [(p, rank) for p, w in zip(level, widths, strict=True) for rank in range(w)]
        level = list(range(first, len(nodes)))
    return nodes


TEMPLATE = template()


class RecyclingDrafter(PeerDrafter):
    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._matrix = np.full((target.vocab_size, WIDTH), UNKNOWN, np.int32)

    def refresh(self, token_ids: NDArray[np.integer[Any]], logits: torch.Tensor) -> None:
        """Learn the likeliest successors of tokens from their rows [len(token_ids), vocabulary]."""
        self._matrix[token_ids] = logits.topk(WIDTH).indices.cpu().numpy()

    def learn(self, earlier: Iterable[tuple[Trajectory, Sequence[Sequence[int]]]]) -> None:
        """Leave the matrix as answering these requests does; with the ids of `successors`."""
        for t, ids in earlier:
            inputs = [t.prompt_ids[-1], *t.output_ids[:-1]]
            self._matrix[inputs] = np.array(ids, np.int32)

    def remember(self, namespace: str, prompt_ids: TokenIds, output_ids: TokenIds) -> None:
        return  # the rows of its forwards taught it everything

    def look_up(self, prompt_ids: Sequence[int]) -> RecyclingLookup:
        return RecyclingLookup(self, prompt_ids[-1])

    def draft(self, pending: int, max_nodes: int, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        node_of: dict[int, int] = {-1: -1}
        for place, (parent, rank) in enumerate(TEMPLATE):
            if parent not in node_of:
                continue
            above = node_of[parent]
            token = int(self._matrix[pending if above < 0 else tokens[above], rank])
            if token != UNKNOWN:
                node_of[place] = len(tokens)
                tokens.append(token)
                parents.append(above)
        return fitted(DraftTree.from_lists(tokens, parents), max_nodes, max_depth)


class RecyclingLookup:
    def __init__(self, drafter: RecyclingDrafter, pending: int) -> None:
        self._drafter = drafter
        self._pending = pending

    def extend(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self._pending = token_ids[-1]

    def draft(self, max_nodes: int, max_depth: int) -> DraftTree:
        return self._drafter.draft(self._pending, max_nodes, max_depth)


def successors(target: Target, answer: Trajectory) -> list[list[int]]:
    """The target's likeliest tokens at the place of each output token of an earlier answer.

    By one prefill: the engine is exact, so these are the rows that decoding had computed.
    """
    return top_ids(target, answer, WIDTH)


class WatchedTarget:
    """A target whose forwards teach a RecyclingDrafter; otherwise the one it wraps."""

    def __init__(self, target: Target, drafter: RecyclingDrafter) -> None:
        self._target = target
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(
        self,
        members: list[SequenceRows],
        cache: KvCache,
        logit_rows: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        logits = self._target.forward(members, cache, logit_rows)
        token_ids = np.concatenate([member.token_ids for member in members])
        self._drafter.refresh(token_ids if logit_rows is None else token_ids[logit_rows], logits)
        return logits


@contextmanager
def room_for_its_tree() -> Iterator[None]:
    """Let the engine verify the 80 nodes its authors use; its own limit is lower."""
    limit = proposal.MAX_TREE_NODES
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("valuspec.engine.") and hasattr(module, "MAX_TREE_NODES")
    ]
    for module in modules:
        module.MAX_TREE_NODES = len(TEMPLATE)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.MAX_TREE_NODES = limit  # type: ignore[attr-defined]
