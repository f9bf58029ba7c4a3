"""What becomes of a verified tree: output tokens, and keys and values in their places.

Nothing here looks at values or thresholds: the target's own choices alone decide.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import torch

from valuspec.engine.head_source import HeadSource
from valuspec.engine.kv_cache import KvCache
from valuspec.engine.rows import SequenceRows
from valuspec.engine.sampling import greedy_token, sample_token
from valuspec.engine.sequence import Sequence
from valuspec.engine.types import StepOutput
from valuspec.engine.verify import Verdict, verify


class Acceptance:
    """Follows the target's choices down each tree, and keeps what was accepted.

    head: told of the features of accepted tokens
    """

    def __init__(self, cache: KvCache, head: HeadSource | None) -> None:
        self._cache = cache
        self._head = head

    def accept(
        self,
        sequences: list[Sequence],
        trees: list[SequenceRows],
        logits: torch.Tensor,
        features: torch.Tensor | None,
        forward_s: float,
    ) -> list[StepOutput]:
        """What each sequence gained by a forward.

        logits: [num_rows, vocab_size], the trees' rows one tree after the other
        features: [at least num_rows, 3 * hidden], of the same rows; None where no head wants them
        """
        verdicts = []
        offset = 0
        for sequence, tree in zip(sequences, trees, strict=True):
            verdicts.append(_verify(sequence, tree, logits[offset : offset + len(tree)]))
            offset += len(tree)
        if self._head is not None and features is not None:
            self._head.observe_trees(sequences, trees, verdicts, features)
        self._commit(sequences, trees, verdicts)
        outputs = []
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            sequence.stats.add_step(
                kept=len(tree) - 1,
                accepted=len(verdict.accepted_rows),
                batch_size=len(sequences),
                forward_s=forward_s,
            )
            outputs.append(sequence.emit(verdict.token_ids))
        return outputs

    def _commit(
        self, sequences: list[Sequence], trees: list[SequenceRows], verdicts: list[Verdict]
    ) -> None:
        """Move the accepted rows' keys and values behind the pending token's, all at once."""
        places: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            for order, row in enumerate(verdict.accepted_rows, start=1):
                if row != order:
                    places.append(sequence.place)
                    sources.append(tree.start + row)
                    targets.append(tree.start + order)
            sequence.committed += 1 + len(verdict.accepted_rows)
        if places:
            cells = partial(self._cache.cells, np.array(places))
            self._cache.move(cells(np.array(sources)), cells(np.array(targets)))


def _verify(sequence: Sequence, rows: SequenceRows, logits: torch.Tensor) -> Verdict:
    ahead = itertools.count()
    return verify(rows, lambda row: choose(sequence, logits[row], next(ahead)))


def choose(sequence: Sequence, logits: torch.Tensor, ahead: int) -> int:
    """The target's token `ahead` places after the last output token, from its logits."""
    if sequence.greedy:
        return greedy_token(logits)
    position = len(sequence.request.prompt_ids) + len(sequence.output_ids) + ahead
    return sample_token(logits, sequence.request.params, position)
