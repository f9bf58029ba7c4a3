"""The rows of one target forward.

A row is one token at one position. A sequence's rows form a tree: row i of a sequence that has
`start` committed tokens is written to cache slot `start + i`, and `parents[i]` names the row that
precedes it (-1: the last committed token). A chunk of a prompt is simply a chain. Committed tokens
have slot == position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.jit import kernel

#: Slots of its own path that a row carries; the deepest draft tree has NEAR - 1 levels.
NEAR = 16

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of one sequence.

    sequence:  row of the cache's block tables
    start:     committed tokens, i.e. position of a row without parent
    token_ids: int64 [num_rows]
    parents:   int64 [num_rows], -1 or an earlier row
    is_chain:  every row follows the one before it (a prompt chunk, or a single token)
    """

    sequence: int
    start: int
    token_ids: Int64Array
    parents: Int64Array

    @classmethod
    def chain(cls, sequence: int, start: int, token_ids: Int64Array) -> SequenceRows:
        return cls(sequence, start, token_ids, np.arange(-1, len(token_ids) - 1))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return bool(np.array_equal(self.parents, np.arange(-1, len(self) - 1)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Everything a forward needs besides weights and cache.

    token_ids, positions: int64 [padded rows]; padding repeats row 0
    logit_rows:           int64 [padded] rows whose logits are wanted; padding repeats the first
    members:              the rows by sequence, in order
    min_width:            every width is padded to a multiple of this
    Of the real rows, in the same order, int64 arrays on the host:
    slots:                [num_rows] where the row's keys and values go
    paths:                [4, num_rows], of the keys it attends to:
        sequences         row of the cache's block tables
        starts            leading slots that hold its context in position order
        lowest            0: without a window it attends from the first position on
        lengths           position + 1
    near:                 [num_rows, NEAR] its last keys' slots in position order; negative slots
                          stand before the first token
    counts:               [num_members] rows of each sequence
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    members: tuple[SequenceRows, ...]
    min_width: int
    slots: Int64Array
    paths: Int64Array
    near: Int64Array
    counts: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def sequences(self) -> Int64Array:
        sequences: Int64Array = self.paths[0]
        return sequences

    @property
    def starts(self) -> Int64Array:
        starts: Int64Array = self.paths[1]
        return starts

    @property
    def lengths(self) -> Int64Array:
        lengths: Int64Array = self.paths[3]
        return lengths


def padded_width(num_rows: int, min_width: int = 4) -> int:
    """Rows to compute for `num_rows` wanted ones: a multiple of `min_width`, in few shapes.

    To the products of libraries, a single row is another kernel (matrix-vector) that rounds
    differently, fp32 kernels take four rows at a time, and bf16 kernels are slower for two rows
    than for four. Every new shape costs a kernel compilation once, so shapes are stepped: 4, 8, ..
    64, 96, 128, .. Where `min_width` is 1 nothing of this holds, and nothing is padded.
    """
    if min_width == 1:
        return num_rows
    step = max(min_width, 4 if num_rows <= 64 else 32)
    return -(-num_rows // step) * step


def build_rows(
    members: list[SequenceRows],
    logit_rows: Int64Array,
    device: torch.device,
    *,
    min_width: int = 4,
) -> Rows:
    """Lay out the rows of one forward.

    members:    rows by sequence
    logit_rows: rows whose logits are wanted, at least one
    min_width:  pad every width to a multiple of this many rows
    """
    of_members = np.array([(m.sequence, m.start) for m in members], np.int64)
    counts = np.array([len(m) for m in members], np.int64)
    token_ids = np.concatenate([m.token_ids for m in members], dtype=np.int64)
    parents = np.concatenate([m.parents for m in members], dtype=np.int64)
    of_rows = np.empty((6, len(parents)), np.int64)
    near = np.empty((len(parents), NEAR), np.int64)
    bad = _lay_out(of_members, counts, parents, of_rows, near)
    if bad >= 0:
        raise ValueError(f"row {bad} follows no earlier row, or is deeper than {NEAR - 1} nodes")

    def padded(array: Int64Array) -> torch.Tensor:
        pad = padded_width(len(array), min_width) - len(array)
        if pad:
            array = np.concatenate([array, np.repeat(array[:1], pad)])
        # Compiled code reads numbers one behind the other, whatever a caller's array is like.
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

    return Rows(
        token_ids=padded(token_ids),
        positions=padded(of_rows[0]),
        logit_rows=padded(logit_rows),
        members=tuple(members),
        min_width=min_width,
        slots=of_rows[1],
        paths=of_rows[2:],
        near=near,
        counts=counts,
    )


@kernel
def _lay_out(
    of_members: Int64Array,
    counts: Int64Array,
    parents: Int64Array,
    of_rows: Int64Array,
    near: Int64Array,
) -> int:
    """Fill what `Rows` says of real rows; returns a row that cannot be, or -1.

    of_members: sequence and start of each, [num_members, 2]; counts: of their rows
    parents: of the rows, one member after the other
    of_rows: positions, slots and the four of `paths`, [6, num_rows]
    """
    positions, slots, sequences, starts, lowest, lengths = of_rows
    first = 0
    for member in range(len(of_members)):
        (sequence, start), count = of_members[member], counts[member]
        in_order = True
        for i in range(count):
            in_order = in_order and parents[first + i] == i - 1
        for i in range(count):
            row, parent = first + i, parents[first + i]
            if parent >= i or parent < -1:
                return row
            slots[row] = start + i
            if in_order or parent < 0:
                positions[row] = start + i if in_order else start
                for j in range(NEAR):
                    near[row, j] = positions[row] - (NEAR - 1 - j)
            else:
                positions[row] = positions[first + parent] + 1
                for j in range(NEAR - 1):
                    near[row, j] = near[first + parent, j + 1]
            near[row, NEAR - 1] = slots[row]
            if not in_order and positions[row] - start >= NEAR:
                return row
            sequences[row], lowest[row] = sequence, 0
            starts[row] = slots[row] + 1 if in_order else start
            lengths[row] = positions[row] + 1
        first += count
    return -1
