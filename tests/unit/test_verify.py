"""Acceptance: exactly the tokens that sequential decoding would have produced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from valuspec.engine.rows import SequenceRows
from valuspec.engine.verify import Verdict, verify

PENDING = 99


def rows_of(tokens: list[int], parents: list[int]) -> SequenceRows:
    """Rows of a draft tree (parents as in DraftTree) behind the pending token."""
    return SequenceRows(
        0, 7, np.array([PENDING, *tokens]), np.array([-1, *(parent + 1 for parent in parents)])
    )


@pytest.mark.parametrize(
    ("tokens", "parents", "choices", "accepted", "output"),
    [
        pytest.param([], [], {0: 5}, (), (5,), id="empty tree"),
        pytest.param([1, 2, 3], [-1, 0, 1], {0: 1, 1: 2, 2: 3, 3: 4}, (1, 2, 3), (1, 2, 3, 4),
                     id="all match"),
        pytest.param([1, 2, 3], [-1, 0, 1], {0: 9}, (), (9,), id="first differs"),
        pytest.param([1, 2, 3], [-1, 0, 1], {0: 1, 1: 9}, (1,), (1, 9), id="second differs"),
        pytest.param([1, 2, 3, 2], [-1, -1, 1, 0], {0: 2, 2: 3, 3: 8}, (2, 3), (2, 3, 8),
                     id="second branch"),
        pytest.param([1, 2, 2, 3], [-1, 0, -1, 2], {0: 1, 1: 2, 2: 3}, (1, 2), (1, 2, 3),
                     id="a child of another branch does not count"),
        pytest.param([1, 1, 2], [-1, -1, 1], {0: 1, 1: 2, 2: 2, 3: 6}, (2, 3), (1, 2, 6),
                     id="same token twice under one parent"),
        pytest.param([PENDING], [-1], {0: PENDING, 1: 4}, (1,), (PENDING, 4),
                     id="the pending token again"),
    ],
)  # fmt: skip
def test_walk(
    tokens: list[int],
    parents: list[int],
    choices: dict[int, int],
    accepted: tuple[int, ...],
    output: tuple[int, ...],
) -> None:
    verdict = verify(rows_of(tokens, parents), lambda row: choices[row])
    assert verdict == Verdict(accepted, output)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Trees over three tokens, so that matches are common and siblings repeat."""
    size = draw(st.integers(0, 24))
    tokens = [draw(st.integers(0, 2)) for _ in range(size)]
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return tokens, parents


@given(trees(), st.integers(0, 10_000))
def test_walk_equals_sequential_decoding(tree: tuple[list[int], list[int]], seed: int) -> None:
    """A target that looks at its whole context, asked row by row and token by token."""
    tokens, parents = tree
    rows = rows_of(tokens, parents)

    def target(context: tuple[int, ...]) -> int:
        return int(np.random.default_rng([seed, *context]).integers(0, 3))

    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths[node] = (*paths[parent], token)
    asked: list[int] = []

    def choose(row: int) -> int:
        asked.append(row)
        return target((PENDING, *paths[row - 1]))

    verdict = verify(rows, choose)

    context = (PENDING,)
    for token in verdict.token_ids:
        assert token == target(context)
        context += (token,)
    # One choice per output token, the accepted rows in path order, and as many as there can be
    # on the branch that was followed.
    assert len(asked) == len(verdict.token_ids) == len(verdict.accepted_rows) + 1
    assert asked == [0, *verdict.accepted_rows]
    for before, row in zip(asked, verdict.accepted_rows, strict=False):
        assert rows.parents[row] == before
    last, bonus = asked[-1], verdict.token_ids[-1]
    assert not any(
        parent == last and token == bonus
        for parent, token in zip(rows.parents, rows.token_ids, strict=True)
    )
