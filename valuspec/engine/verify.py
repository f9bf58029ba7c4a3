"""Which draft tokens are accepted: exactly those the target would have produced alone.

This module sees rows and the target's choices, never values or thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from valuspec.engine.rows import SequenceRows


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one verification.

    accepted_rows: rows of the accepted draft tokens, root to leaf (the pending token, row 0, is
        part of the output already and not listed)
    token_ids:     the accepted draft tokens and then the bonus token, in order
    """

    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]


def verify(rows: SequenceRows, choose: Callable[[int], int]) -> Verdict:
    """Walk down from row 0, following the target's choice while a child holds it.

    choose: the target's next token after a given row; called once per visited row
    """
    children = {
        (parent, token): row
        for row, (parent, token) in enumerate(
            zip(rows.parents.tolist(), rows.token_ids.tolist(), strict=True)
        )
    }
    row = 0
    accepted: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(row)
        tokens.append(token)
        child = children.get((row, token))
        if child is None:
            return Verdict(tuple(accepted), tuple(tokens))
        accepted.append(child)
        row = child
