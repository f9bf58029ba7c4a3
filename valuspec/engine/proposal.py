"""What a step puts to the test: drafts of all decoding requests, cut to what pays.

Drafting may only cost speed. Whatever a draft source or a filter does wrong, the request goes on
without a tree, and a counter says so.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from valuspec.budget import share_budget
from valuspec.engine.head_source import HeadSource
from valuspec.engine.rows import SequenceRows
from valuspec.engine.sequence import Sequence as Running
from valuspec.evidence import CandidateTree, Evidence
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

logger = logging.getLogger(__name__)

NOTHING = CandidateTree(DraftTree.empty(), Evidence.of_tree(DraftTree.empty()))

#: Largest candidate tree of one sequence.
MAX_TREE_NODES = 64
#: Chooses nodes to verify: (candidate trees of a batch, their thresholds, batch size, most nodes
#: in all) -> by tree, ascending indices.
Filter = Callable[
    [Sequence[CandidateTree], Sequence[ThresholdSet], int, int], Sequence[NDArray[np.int32]]
]


def keep_by_value(
    candidates: Sequence[CandidateTree],
    thresholds: Sequence[ThresholdSet],
    batch_size: int,
    max_nodes: int,
) -> Sequence[NDArray[np.int32]]:
    """The filter of this project; benches swap in others."""
    return share_budget(candidates, thresholds, batch_size=batch_size, max_nodes=max_nodes)


class Proposer:
    """Drafts and filters.

    max_depth: deepest tree the target can verify; vocab_size: of the target
    max_rows:  most rows of a step, pending tokens included; None for any number
    head:      a draft head to ask as well, or alone
    """

    def __init__(
        self,
        *,
        max_depth: int,
        vocab_size: int,
        max_rows: int | None,
        counters: Counter[str],
        head: HeadSource | None = None,
    ) -> None:
        self._max_depth = max_depth
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._counters = counters
        self._head = head
        self.seconds = 0.0
        """What drafts and valuation took in the last step."""
        self.head_seconds = 0.0
        """And what the draft head took, which is not always asked."""

    def rows(self, sequences: Sequence[Running], node_filter: Filter) -> list[SequenceRows]:
        """Rows to verify: of each sequence its pending token and the nodes worth their cost."""
        self.seconds = self.head_seconds = 0.0
        most = MAX_TREE_NODES * len(sequences)
        if self._max_rows is not None:
            most = min(most, self._max_rows - len(sequences))
        trees = [NOTHING.tree] * len(sequences)
        if most > 0:
            offers = [(i, self._draft(sequence)) for i, sequence in enumerate(sequences)]
            drafted = [(i, candidate) for i, candidate in offers if candidate is not None]
            if drafted and self._head is not None:
                drafted = self._ask_head(self._head, sequences, drafted)
            if drafted:
                self._cut(sequences, drafted, node_filter, most, trees)
        return [
            SequenceRows(
                sequence.place,
                sequence.committed,
                np.array([sequence.pending, *tree.tokens.tolist()]),
                np.array([-1, *(tree.parents + 1).tolist()]),
            )
            for sequence, tree in zip(sequences, trees, strict=True)
        ]

    def _depth(self, sequence: Running) -> int:
        """The forward adds a token of its own, so a draft may be one shorter than the rest."""
        return min(self._max_depth, sequence.remaining_tokens - 1)

    def _draft(self, sequence: Running) -> CandidateTree | None:
        """Candidate tree of one sequence; None where it decodes without drafts."""
        if sequence.session is None or self._depth(sequence) <= 0:
            return None
        if self._head is not None and self._head.alone:
            return replace(NOTHING, context=sequence.context)
        started = time.perf_counter()
        try:
            candidate = sequence.session.propose(
                max_nodes=MAX_TREE_NODES, max_depth=self._depth(sequence)
            )
        except Exception as error:  # noqa: BLE001  (logged by _failed)
            self._failed(sequence, error)
            return None
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        sequence.stats.draft_s += elapsed
        sequence.stats.num_offered_nodes += len(candidate)
        return candidate

    def _ask_head(
        self,
        head: HeadSource,
        sequences: Sequence[Running],
        drafted: Sequence[tuple[int, CandidateTree]],
    ) -> list[tuple[int, CandidateTree]]:
        """The candidates (index, tree) with what the head adds to them."""
        started = time.perf_counter()
        owners = [sequences[i] for i, _ in drafted]
        candidates = [candidate for _, candidate in drafted]
        try:
            candidates = head.extend(owners, candidates, [self._depth(s) for s in owners])
        except Exception as error:  # noqa: BLE001  (logged by _failed)
            self._failed(owners[0], error)
        self.head_seconds = elapsed = time.perf_counter() - started
        for sequence, (_, before), candidate in zip(owners, drafted, candidates, strict=True):
            sequence.stats.draft_s += elapsed / len(owners)
            sequence.stats.num_offered_nodes += len(candidate) - len(before)
        return [(i, candidate) for (i, _), candidate in zip(drafted, candidates, strict=True)]

    def _cut(
        self,
        sequences: Sequence[Running],
        drafted: Sequence[tuple[int, CandidateTree]],
        node_filter: Filter,
        most: int,
        trees: list[DraftTree],
    ) -> None:
        """Put what the filter keeps of the candidates (index, tree) into `trees`."""
        started = time.perf_counter()
        owners = [sequences[i] for i, _ in drafted]
        candidates = [candidate for _, candidate in drafted]
        try:
            parts = node_filter(candidates, [s.thresholds for s in owners], len(sequences), most)
        except Exception as error:  # noqa: BLE001  (logged by _failed)
            self._failed(owners[0], error)
            return
        left = most
        for (index, candidate), kept in zip(drafted, parts, strict=True):
            sequence = sequences[index]
            try:
                tree = candidate.tree.select(kept).validate(
                    vocab_size=self._vocab_size,
                    max_nodes=min(left, MAX_TREE_NODES),
                    max_depth=self._depth(sequence),
                )
            except Exception as error:  # noqa: BLE001  (logged by _failed)
                self._failed(sequence, error)
                continue
            trees[index] = tree
            left -= len(tree)
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        for sequence in owners:
            sequence.stats.valuation_s += elapsed / len(owners)

    def _failed(self, sequence: Running, error: Exception) -> None:
        request_id = sequence.request.request_id
        logger.error("drafting failed for request %s", request_id, exc_info=error)
        self._counters["draft_errors"] += 1
