"""What becomes of a verified tree: output tokens, and keys and values in their places.

Nothing here looks at values or thresholds: the target's own choices alone decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from valuspec.engine.head_source import HeadSource
from valuspec.engine.kv_cache import KvCache
from valuspec.engine.rows import SequenceRows
from valuspec.engine.sampling import Greedy, sample_token
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

        logits: [at least num_rows, vocab_size], the trees' rows first, one tree after the other
        features: [at least num_rows, 3 * hidden], of the same rows; None where no head wants them
        """
        greedy = Greedy(logits)
        verdicts = []
        first = 0
        for sequence, tree in zip(sequences, trees, strict=True):
            verdicts.append(verify(tree, choices(sequence, logits, greedy, first)))
            first += len(tree)
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

    def begin(self, sequence: Sequence, logits: torch.Tensor, row: int) -> StepOutput:
        """The first token of a sequence whose context ends in a row of logits."""
        return sequence.emit((choices(sequence, logits, Greedy(logits), row)(0),))

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


def choices(
    sequence: Sequence, logits: torch.Tensor, greedy: Greedy, first: int
) -> Callable[[int], int]:
    """The target's next token after a row, to be asked for in order of position.

    logits: of the whole forward, with `greedy` of the same; the sequence's row 0 is row `first`
    """
    if sequence.greedy:
        return lambda row: greedy.token(first + row)
    position = len(sequence.request.prompt_ids) + len(sequence.output_ids)
    ahead = itertools.count()
    params = sequence.request.params
    return lambda row: sample_token(logits[first + row], params, position + next(ahead))
