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

    def positions_and_near(self) -> tuple[Int64Array, Int64Array]:
        """Positions [num_rows], and slots of the near zone in position order [num_rows, NEAR].

        Slots of positions before the first token come out negative; the caller masks them.
        """
        window = np.arange(-NEAR + 1, 1)
        if self.is_chain:
            positions = self.start + np.arange(len(self))
            return positions, positions[:, None] + window
        positions = np.empty(len(self), np.int64)
        near = np.empty((len(self), NEAR), np.int64)
        for row, parent in enumerate(self.parents.tolist()):
            slot = self.start + row
            if parent < 0:
                positions[row] = self.start
                near[row] = self.start + window
            else:
                positions[row] = positions[parent] + 1
                near[row, :-1] = near[parent, 1:]
            near[row, -1] = slot
        if positions.max() - self.start >= NEAR:
            raise ValueError(f"tree deeper than {NEAR - 1} nodes")
        return positions, near


@dataclass(frozen=True, slots=True)
class Rows:
    """Everything a forward needs besides weights and cache.

    token_ids, positions: int64 [padded rows]; padding repeats row 0
    logit_rows:           int64 [padded] rows whose logits are wanted; padding repeats the first
    members:              the rows by sequence, in order
    min_width:            every width is padded to a multiple of this
    Of the real rows, in the same order, int64 arrays on the host:
    sequences:            [num_rows] row of the cache's block tables
    slots:                [num_rows] where the row's keys and values go
    starts:               [num_rows] leading slots that hold its context in position order
    lengths:              [num_rows] position + 1: the keys it attends to
    near:                 [num_rows, NEAR] its last keys' slots in position order; negative slots
                          stand before the first token
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    members: tuple[SequenceRows, ...]
    min_width: int
    sequences: Int64Array
    slots: Int64Array
    starts: Int64Array
    lengths: Int64Array
    near: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.slots)


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
    geometry = [member.positions_and_near() for member in members]
    token_ids = np.concatenate([m.token_ids for m in members])
    positions = np.concatenate([p for p, _ in geometry])
    counts = [len(m) for m in members]
    slots = np.concatenate([m.start + np.arange(len(m)) for m in members])
    in_order = np.repeat([m.is_chain for m in members], counts)
    starts = np.where(in_order, slots + 1, np.repeat([m.start for m in members], counts))
    lengths = positions + 1
    if np.any(lengths < starts) or np.any(lengths > starts + NEAR):
        # Compiled attention follows these numbers without looking.
        raise RuntimeError("a row's path leaves its tree")

    def padded(array: Int64Array) -> torch.Tensor:
        pad = padded_width(len(array), min_width) - len(array)
        whole = np.concatenate([array, np.repeat(array[:1], pad)])
        return torch.from_numpy(np.ascontiguousarray(whole, np.int64)).to(device)

    return Rows(
        token_ids=padded(token_ids),
        positions=padded(positions),
        logit_rows=padded(logit_rows),
        members=tuple(members),
        min_width=min_width,
        sequences=np.repeat([m.sequence for m in members], counts),
        slots=slots,
        starts=starts,
        lengths=lengths,
        near=np.concatenate([n for _, n in geometry]),
    )
