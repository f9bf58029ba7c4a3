"""What an engine asks of a draft source, in a form that others' sources fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from valuspec.drafting.drafter import Drafter, DraftSession, TokenIds
from valuspec.evidence import CandidateTree, Evidence
from valuspec.replay import Trajectory
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree


class Lookup(Protocol):
    """A request's view of a peer's source."""

    def extend(self, token_ids: Sequence[int]) -> None: ...

    def draft(self, max_nodes: int, max_depth: int) -> DraftTree: ...


class PeerDrafter(Drafter):
    """Base of the adapters. A peer's rule decides alone: nothing is retrieved or valued."""

    def __init__(self) -> None:
        super().__init__(shared_tokens=64)

    def stock(self, earlier: Iterable[Trajectory]) -> None:
        """Learn finished requests."""
        for t in earlier:
            self.remember(t.namespace, t.prompt_ids, t.output_ids)

    def look_up(self, prompt_ids: Sequence[int]) -> Lookup:
        raise NotImplementedError

    def start(self, namespace: str, prompt_ids: TokenIds) -> DraftSession:
        return PeerSession(self.look_up([int(token) for token in prompt_ids]))


class PeerSession(DraftSession):
    """One request of a PeerDrafter."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def extend(self, token_ids: TokenIds) -> None:
        self._lookup.extend([int(token) for token in token_ids])

    def add_retrieved(self, trees: Iterable[DraftTree]) -> None:
        return

    def propose(self, max_nodes: int = 64, max_depth: int = 15) -> CandidateTree:
        tree = self._lookup.draft(max_nodes, max_depth)
        return CandidateTree(tree, Evidence.of_draft_model(tree, np.ones(len(tree), np.float32)))


def fitted(tree: DraftTree, max_nodes: int, max_depth: int) -> DraftTree:
    """The tree without what lies too deep, and of that the first nodes; parents come first."""
    return tree.select(np.flatnonzero(tree.depths() <= max_depth)[:max_nodes])


def everything(
    candidates: Sequence[CandidateTree],
    thresholds: Sequence[ThresholdSet],
    batch_size: int,
    max_nodes: int,
) -> list[NDArray[np.int32]]:
    """Verify all that was drafted: the filter of a source that has chosen already."""
    return [np.arange(len(candidate), dtype=np.int32) for candidate in candidates]
