"""The suffix index against a naive search over a plain list of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.drafting.suffix import (
    CONTEXT,
    GRAMS,
    MAX_HITS,
    MAX_MATCH,
    SEPARATOR,
    Continuations,
    SuffixIndex,
)

DEPTH = 15
Row = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Match length, agreement, tokens, weights."""


@dataclass
class NaiveIndex:
    """All tokens ever appended; looks at every position of the last `capacity`."""

    capacity: int
    tokens: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def append(self, tokens: list[int], weights: list[int], owner: int) -> None:
        self.tokens += tokens
        self.weights += weights
        self.owners += [owner] * len(tokens)

    def search(self, tail: list[int], owner: int) -> list[Row]:
        oldest = max(0, len(self.tokens) - self.capacity)
        by_gram: list[list[Row]] = [[] for _ in GRAMS]
        for position in range(len(self.tokens) - 2, oldest - 1, -1):
            length = 0
            while (
                length < min(len(tail), MAX_MATCH)
                and position - length >= oldest
                and self.tokens[position - length] == tail[-1 - length]
            ):
                length += 1
            before = self.tokens[oldest : position + 1]
            if SEPARATOR in before:
                before = before[len(before) - before[::-1].index(SEPARATOR) :]
            agreement = sum(a == b for a, b in zip(before[::-1], tail[::-1], strict=False))
            follow = self.tokens[position + 1 : position + 1 + DEPTH]
            if SEPARATOR in follow:
                follow = follow[: follow.index(SEPARATOR)]
            if length and follow and self.owners[position] == owner:
                level = max(i for i, n in enumerate(GRAMS) if n <= length)
                weights = self.weights[position + 1 : position + 1 + len(follow)]
                by_gram[level].append((length, agreement, tuple(follow), tuple(weights)))
        return [row for rows in reversed(by_gram) for row in rows[:MAX_HITS]]


def search(index: SuffixIndex, tail: list[int], owner: int = 0) -> list[Row]:
    found = Continuations.allocate(512, DEPTH)
    rows = index.search(np.array(tail, np.int32), found, 0, 1, owner)
    result = []
    for row in range(rows):
        tokens = found.tokens[row].tolist()
        depth = tokens.index(SEPARATOR) if SEPARATOR in tokens else DEPTH
        weights = tuple(found.weights[row, :depth].tolist())
        length, agreement = int(found.lengths[row]), int(found.agreement[row])
        result.append((length, agreement, tuple(tokens[:depth]), weights))
    return result


chunks = st.lists(
    st.tuples(
        st.lists(st.integers(-1, 3), min_size=1, max_size=40),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    chunks,
    st.sampled_from([16, 32, 64]),
    st.lists(st.integers(0, 3), max_size=CONTEXT),
)
def test_finds_what_a_naive_search_finds(
    documents: list[tuple[list[int], int, int]], capacity: int, tail: list[int]
) -> None:
    """Also after the ring has wrapped, across separators, owners and hash collisions."""
    index, naive = SuffixIndex(capacity), NaiveIndex(capacity)
    for tokens, weight, owner in documents:
        tokens = [*tokens, SEPARATOR]
        index.append(np.array(tokens, np.int32), weight, owner)
        naive.append(tokens, [weight] * len(tokens), owner)
        for who in (0, 1):
            assert search(index, tail, who) == naive.search(tail, who)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), st.integers(1, 7))
def test_pieces_append_like_the_whole(tokens: list[int], piece: int) -> None:
    whole, pieces = SuffixIndex(64), SuffixIndex(64)
    whole.append(np.array(tokens, np.int32))
    for start in range(0, len(tokens), piece):
        pieces.append(np.array(tokens[start : start + piece], np.int32))
    tail = tokens[-CONTEXT:]
    assert search(whole, tail) == search(pieces, tail)


def test_match_length_is_capped() -> None:
    index = SuffixIndex(256)
    index.append(np.array([*range(100, 140), 7], np.int32))
    assert search(index, list(range(110, 140))) == [(MAX_MATCH, 30, (7,), (1,))]


def test_a_passage_with_another_name_in_it_agrees_all_the_same() -> None:
    index = SuffixIndex(64)
    index.append(np.array([1, 2, 3, 50, 4, 5, 6], np.int32))
    assert search(index, [9, 2, 3, 51, 4, 5]) == [(2, 4, (6,), (1,))]


def test_the_open_end_of_the_context_is_no_match_of_itself() -> None:
    index = SuffixIndex(64)
    index.append(np.array([5, 6, 7], np.int32))
    assert search(index, [5, 6, 7]) == []


def test_eviction_is_by_tokens() -> None:
    index = SuffixIndex(16)
    index.append(np.array([1, 2, 3, SEPARATOR], np.int32))
    assert search(index, [1, 2]) == [(2, 2, (3,), (1,))]
    index.append(np.arange(20, 34, dtype=np.int32))  # 18 tokens in all: 1 and 2 are gone
    assert len(index) == 16
    assert search(index, [1, 2]) == []


def test_continuations_beyond_the_buffer_are_left_out() -> None:
    index = SuffixIndex(64)
    for token in range(5):
        index.append(np.array([9, token, SEPARATOR], np.int32))
    found = Continuations.allocate(3, DEPTH)
    assert index.search(np.array([9], np.int32), found, 1, 1) == 3
    assert found.tokens[1:, 0].tolist() == [4, 3]


@pytest.mark.parametrize("capacity", [1, 16, 17, 1000])
def test_capacity_is_a_power_of_two_of_at_least_what_was_asked(capacity: int) -> None:
    size = SuffixIndex(capacity).capacity
    assert size >= capacity
    assert size & (size - 1) == 0
