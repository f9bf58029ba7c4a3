"""Find where the end of the context occurred before, in a bounded ring of tokens.

Hash chains as in LZ77: for n = 1, 2, 4, 8 a head table gives the latest position whose last n
tokens have this hash, and a link per position gives the one before. Positions count up forever
(64 bit) and the slot is `position % capacity`, so appending evicts the oldest token and a link
older than the ring is dead: the index is bounded by tokens and needs no clean-up.

A document ends with a separator (-1); matches and continuations never cross one. Every position
has an owner, and a search sees its own owner's positions only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec.jit import kernel

SEPARATOR = -1
MAX_MATCH = 16
"""Longest match length told apart, in tokens."""
CONTEXT = 32
"""Tokens before the draft in which agreement is counted."""
GRAMS = (1, 2, 4, 8)
"""Lengths of the hashed token groups, ascending."""
MAX_HITS = 24
"""Occurrences taken from one chain, the latest first."""
MAX_PROBES = 96
"""Links followed in one chain."""

IntArray = NDArray[np.int32]


class Continuations(NamedTuple):
    """A buffer of what followed earlier occurrences of the context's end, one row each.

    tokens:  int32 [max_rows, max_depth], padded with -1
    weights: int32 [max_rows, max_depth], how many answers each token stands for
    lengths: int32 [max_rows], match length in tokens, 1 to MAX_MATCH
    agreement: int32 [max_rows], equal tokens among the last CONTEXT, compared place by place: a
        passage that differs in a name or a number still shows
    sources: int32 [max_rows], see `evidence.Source`
    """

    tokens: IntArray
    weights: IntArray
    lengths: IntArray
    agreement: IntArray
    sources: IntArray

    @classmethod
    def allocate(cls, max_rows: int, max_depth: int) -> Continuations:
        return cls(
            np.full((max_rows, max_depth), SEPARATOR, np.int32),
            np.zeros((max_rows, max_depth), np.int32),
            np.zeros(max_rows, np.int32),
            np.zeros(max_rows, np.int32),
            np.zeros(max_rows, np.int32),
        )


class _Ring(NamedTuple):
    tokens: IntArray  # [capacity]
    weights: IntArray  # [capacity]
    owners: IntArray  # [capacity]
    heads: NDArray[np.int64]  # [len(GRAMS), capacity], by hash
    links: NDArray[np.int64]  # [len(GRAMS), capacity]
    state: NDArray[np.int64]  # [next position, length of the open document]


class SuffixIndex:
    """Token documents, searchable by the end of a context. Not thread-safe.

    capacity: tokens kept (separators included), rounded up to a power of two.
    """

    def __init__(self, capacity: int) -> None:
        size = 1 << max(4, int(capacity - 1).bit_length())
        self.capacity = size
        self._ring = _Ring(
            tokens=np.full(size, SEPARATOR, np.int32),
            weights=np.zeros(size, np.int32),
            owners=np.full(size, -1, np.int32),
            heads=np.full((len(GRAMS), size), -1, np.int64),
            links=np.full((len(GRAMS), size), -1, np.int64),
            state=np.zeros(2, np.int64),
        )

    def __len__(self) -> int:
        """Tokens held now."""
        return int(min(self._ring.state[0], self.capacity))

    def append(self, tokens: IntArray, weights: IntArray | int = 1, owner: int = 0) -> None:
        """Continue the open document with int32 `tokens`; a SEPARATOR among them ends it.

        weights: one for all tokens, or int32 of the same length. A token of weight 0 serves as
        context and leads on to later tokens, but adds nothing to the count of its own node.
        """
        if not isinstance(weights, np.ndarray):
            weights = np.full(len(tokens), weights, np.int32)
        _append(self._ring, tokens, weights, owner)

    def end_document(self, owner: int = 0) -> None:
        self.append(np.array([SEPARATOR], np.int32), 0, owner)

    def search(
        self, tail: IntArray, out: Continuations, row: int, source: int, owner: int = 0
    ) -> int:
        """Write what followed earlier occurrences of `tail`'s end; return the next free row.

        tail: int32 [<= CONTEXT], the last tokens of the context. Rows are written from `row`
        on, longest token group first and latest first within a chain, until `out` is full.
        """
        return _search(self._ring, tail, owner, source, out, row)


@kernel
def _append(ring: Any, tokens: Any, weights: Any, owner: int) -> None:
    mask = ring.tokens.size - 1  # x & mask is x modulo the capacity, a power of two
    position, run = ring.state[0], ring.state[1]
    for i in range(tokens.size):
        slot = position & mask
        ring.tokens[slot] = tokens[i]
        ring.weights[slot] = weights[i]
        ring.owners[slot] = owner
        run = 0 if tokens[i] < 0 else run + 1
        code = np.uint64(owner)
        back, level = 0, 0
        while level < len(GRAMS) and GRAMS[level] <= run:
            while back < GRAMS[level]:
                code = _mix(code, ring.tokens[(position - back) & mask])
                back += 1
            bucket = _bucket(code, mask)
            ring.links[level, slot] = ring.heads[level, bucket]
            ring.heads[level, bucket] = position
            level += 1
        position += 1
    ring.state[0], ring.state[1] = position, run


@kernel
def _search(ring: Any, tail: Any, owner: int, source: int, out: Any, row: int) -> int:
    mask = ring.tokens.size - 1
    end = ring.state[0]
    oldest = max(0, end - ring.tokens.size)
    max_rows, max_depth = out.tokens.shape
    starts = np.full(len(GRAMS), -1, np.int64)
    code = np.uint64(owner)
    back = 0
    for level in range(len(GRAMS)):
        if GRAMS[level] <= tail.size:
            while back < GRAMS[level]:
                code = _mix(code, tail[tail.size - 1 - back])
                back += 1
            starts[level] = ring.heads[level, _bucket(code, mask)]
    longest = min(tail.size, MAX_MATCH)
    for level in range(len(GRAMS) - 1, -1, -1):
        # Longer matches were found by the longer group already.
        limit = GRAMS[level + 1] if level + 1 < len(GRAMS) else MAX_MATCH + 1
        position = starts[level]
        hits, probes = 0, 0
        while position >= oldest and hits < MAX_HITS and probes < MAX_PROBES and row < max_rows:
            probes += 1
            follow = position + 1
            if follow < end and ring.tokens[follow & mask] >= 0:
                length = 0
                while (
                    length < longest
                    and length < limit
                    and position - length >= oldest
                    and ring.tokens[(position - length) & mask] == tail[tail.size - 1 - length]
                ):
                    length += 1
                if GRAMS[level] <= length < limit and ring.owners[position & mask] == owner:
                    depth = 0
                    while depth < max_depth and follow < end:
                        token = ring.tokens[follow & mask]
                        if token < 0:
                            break
                        out.tokens[row, depth] = token
                        out.weights[row, depth] = ring.weights[follow & mask]
                        depth += 1
                        follow += 1
                    if depth < max_depth:
                        out.tokens[row, depth] = SEPARATOR
                    out.lengths[row] = length
                    out.agreement[row] = length + _agreement(ring, tail, position, length, oldest)
                    out.sources[row] = source
                    row += 1
                    hits += 1
            position = ring.links[level, position & mask]
    return row


@kernel
def _agreement(ring: Any, tail: Any, position: int, skipped: int, oldest: int) -> int:
    """Equal tokens before `position` and `tail`'s end, the last `skipped` ones left out."""
    mask = ring.tokens.size - 1
    equal = 0
    for back in range(skipped, min(tail.size, position - oldest + 1)):
        token = ring.tokens[(position - back) & mask]
        if token < 0:
            break
        if token == tail[tail.size - 1 - back]:
            equal += 1
    return equal


@kernel
def _mix(code: Any, token: Any) -> Any:
    return (code ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)


@kernel
def _bucket(code: Any, mask: int) -> Any:
    return np.int64((code >> np.uint64(32)) & np.uint64(mask))
