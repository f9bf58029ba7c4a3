"""A draft head beside the target: it reads the target's features and drafts for the batch.

Drafting takes time, so it is left out where it has not paid for requests like these: what a draft
adds to the expected tokens is remembered by how much the tree had to offer without it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.drafting.eagle3 import HeadDraft, merge
from valuspec.eagle3.drafter import HeadDrafter
from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.tree import TreeShape
from valuspec.engine.rows import SequenceRows
from valuspec.engine.sequence import Sequence as Running
from valuspec.engine.verify import Verdict
from valuspec.evidence import CandidateTree
from valuspec.valuation import expected_gain

GAIN_EDGES = np.array([0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0])
"""Buckets of the tokens expected of a tree without the head's draft."""
TRIAL_EVERY = 16
"""Of so many steps without a draft one makes one for a request, to notice when it would pay."""
MEMORY = 0.05
"""Weight of the latest draft in the averages."""
LATEST = 15
Draft = Literal["eagle3", "hybrid"]
CPU_SHAPES: dict[Draft, TreeShape] = {
    "eagle3": TreeShape(top_k=4, depth=1, total_tokens=13),
    "hybrid": TreeShape(top_k=4, depth=0, total_tokens=5),
}
"""Where a level of the tree takes a tenth of a plain step, deep trees do not pay; what occurred
before goes on for several tokens where it is right, and leaves a second level little to win."""


@dataclass(frozen=True, slots=True)
class HeadChoice:
    """A loaded head and how it is used: alone, or with what occurred before."""

    head: DraftHead
    draft: Draft
    shape: TreeShape
    always: bool = False
    """Draft in every step, paying or not."""

    @classmethod
    def on_cpu(cls, head: DraftHead, draft: Draft) -> HeadChoice:
        return cls(head, draft, CPU_SHAPES[draft])


class HeadSource:
    """Use from the engine's thread.

    tables, num_blocks: of the engine's cache
    """

    def __init__(self, choice: HeadChoice, tables: NDArray[np.int64], num_blocks: int) -> None:
        self.alone = choice.draft == "eagle3"
        self.layer_ids = choice.head.config.layer_ids
        self.always = choice.always
        """Draft in every step, paying or not."""
        self._drafter = HeadDrafter(choice.head, tables, num_blocks, choice.shape)
        # Tokens a draft added on average, by bucket; hopeful at first.
        self._added = np.full(len(GAIN_EDGES) + 1, 2.0)
        # Of the latest drafts, per request. The first one may have compiled what it ran.
        self._times: deque[float] = deque(maxlen=LATEST)
        self._seconds = 0.0  # their median
        self._left_out = 0

    # ---- what the target has computed

    def observe_trees(
        self,
        sequences: Sequence[Running],
        trees: Sequence[SequenceRows],
        verdicts: Sequence[Verdict],
        features: torch.Tensor,
    ) -> None:
        """Take those features [num_rows, 3 * hidden] that belong to pending or accepted tokens."""
        offset = 0
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            if sequence.session is not None:
                rows = torch.from_numpy(np.array([0, *verdict.accepted_rows]) + offset)
                tokens = np.array(verdict.token_ids, np.int64)
                seen = features.index_select(0, rows)
                self._drafter.observe(sequence.place, tree.start, seen, tokens)
            offset += len(tree)

    def observe_chunks(
        self, chunks: Sequence[tuple[Running, SequenceRows]], features: torch.Tensor
    ) -> None:
        """Take the features [num_rows, 3 * hidden] of parts of contexts, computed just now."""
        offset = 0
        for sequence, chunk in chunks:
            if sequence.session is not None:
                end = chunk.start + len(chunk)
                tokens = sequence.tokens(chunk.start + 1, end + 1)
                rows = features[offset : offset + len(chunk)]
                self._drafter.observe(sequence.place, chunk.start, rows, tokens)
            offset += len(chunk)

    def copy(self, source: int, target: int) -> None:
        """A sequence begins a block of the cache as another one did."""
        self._drafter.copy(source, target)

    def forget(self, place: int) -> None:
        """The sequence at this place has left."""
        self._drafter.forget(place)

    # ---- what the head proposes

    def extend(
        self, sequences: Sequence[Running], candidates: Sequence[CandidateTree], depths: list[int]
    ) -> list[CandidateTree]:
        """The candidate trees with the head's drafts, where those pay.

        depths: most levels of each tree
        """
        size = len(sequences)
        gains = [
            expected_gain(c, s.thresholds, batch_size=size)
            for s, c in zip(sequences, candidates, strict=True)
        ]
        ready = [i for i, s in enumerate(sequences) if self._drafter.ready(s.place)]
        chosen = [i for i in ready if self.always or self._pays(sequences[i], gains[i], size)]
        if ready and not chosen:
            self._left_out += 1
            if self._left_out % TRIAL_EVERY == 0:
                chosen = ready[:1]
        merged = list(candidates)
        if not chosen:
            return merged
        started = time.perf_counter()
        drafts = self._drafter.draft(
            [sequences[i].place for i in chosen], [depths[i] for i in chosen]
        )
        for i, draft in zip(chosen, drafts, strict=True):
            merged[i] = self._merged(candidates[i], draft)
        self._learn_seconds((time.perf_counter() - started) / len(chosen))
        for i in chosen:
            added = expected_gain(merged[i], sequences[i].thresholds, batch_size=size) - gains[i]
            bucket = np.searchsorted(GAIN_EDGES, gains[i], side="right")
            self._added[bucket] += MEMORY * (added - self._added[bucket])
        return merged

    def _merged(self, candidate: CandidateTree, draft: HeadDraft) -> CandidateTree:
        return draft.candidate(candidate.context) if self.alone else merge(candidate, draft)

    def _pays(self, sequence: Running, gain: float, batch_size: int) -> bool:
        bucket = np.searchsorted(GAIN_EDGES, gain, side="right")
        # Everyone in the batch waits for a draft.
        price = sequence.thresholds.tokens_of(self._seconds * batch_size, batch_size=batch_size)
        return bool(self._added[bucket] > price)

    def _learn_seconds(self, seconds: float) -> None:
        self._times.append(seconds)
        if len(self._times) > 1:
            self._seconds = sorted(self._times)[(len(self._times) - 1) // 2]
