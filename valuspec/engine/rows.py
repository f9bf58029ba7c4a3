"""The rows of one target forward, and the index tensors that every layer shares.

A row is one token at one position. A sequence's rows form a tree: row i of a sequence that has
`start` committed tokens is written to cache slot `start + i`, and `parents[i]` names the row that
precedes it (-1: the last committed token). A chunk of a prompt is simply a chain. Committed tokens
have slot == position.

Two-zone attention (why speculation can be bit-exact at all): a query at position p attends to

- the far zone, positions <= p - NEAR, in position order from the cache, and
- the near zone, positions p - NEAR + 1 .. p, gathered along the row's own path, in position order.

Which zone a key falls in depends on p alone, so one-token decoding and any tree do the same
arithmetic for the same token. A tree of depth < NEAR never reaches into its own far zone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine.kv_cache import BLOCK, KvCache

#: Width of the near zone; the deepest draft tree has NEAR - 1 levels.
NEAR = 16

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of one sequence.

    sequence:  index of the sequence in the cache
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
class Group:
    """Neighbouring sequences whose attention runs as one batch of equally many (padded) rows.

    first, count: the sequences [first, first + count) of the cache
    width:        rows per sequence, padding included
    num_blocks:   key blocks any of them has filled
    gather:       int64 [count * width] rows to take, or None when the rows are already so laid out
    scatter:      int64 [rows of the group] where each row's result lies, or None likewise
    positions:    int64 [count, width]
    near_scores:  int64 [count, heads, width, group size, NEAR] offsets into the score buffer
    near_values:  int64 [count * heads * width * NEAR] rows of a layer's value store
    """

    first: int
    count: int
    width: int
    num_blocks: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    positions: torch.Tensor
    near_scores: torch.Tensor
    near_values: torch.Tensor

    def masks(self, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Additive masks: far [blocks, count, 1, width, 1, BLOCK], near [count, 1, width, 1, NEAR].

        `window` is the sliding window of the layer (keys at p - window and before are hidden).
        """
        p = self.positions[:, :, None]  # [count, width, 1]
        lowest = p - (window if window is not None else torch.iinfo(torch.int64).max // 2)
        keys = torch.arange(self.num_blocks * BLOCK, device=p.device)
        far_hidden = (keys > p - NEAR) | (keys <= lowest)
        near = p + torch.arange(-NEAR + 1, 1, device=p.device)
        near_hidden = (near < 0) | (near <= lowest)
        far = torch.zeros_like(far_hidden, dtype=dtype).masked_fill_(far_hidden, -torch.inf)
        far = far.view(self.count, self.width, self.num_blocks, BLOCK).permute(2, 0, 1, 3)
        near_mask = torch.zeros_like(near_hidden, dtype=dtype).masked_fill_(near_hidden, -torch.inf)
        return far.contiguous()[:, :, None, :, None], near_mask[:, None, :, None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Everything a forward needs besides weights and cache.

    token_ids, positions: int64 [padded rows]; padding repeats row 0
    num_rows:             real rows; only these are written to the cache
    key_slots, value_slots: where the real rows' keys and values go (see KvCache)
    groups:               attention batches, covering the rows in order
    logit_rows:           int64 [padded] rows whose logits are wanted; padding repeats the first
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_rows: int
    key_slots: torch.Tensor
    value_slots: torch.Tensor
    groups: tuple[Group, ...]
    logit_rows: torch.Tensor


def padded_width(num_rows: int, min_width: int = 2) -> int:
    """Rows to compute for `num_rows` wanted ones: a multiple of `min_width`, in few shapes.

    A single row takes another kernel (matrix-vector) that rounds differently; and every new shape
    costs a kernel compilation once, so shapes are stepped: 2, 4, .. 16, 20, .. 64, 96, 128, ..
    """
    if num_rows <= min_width:
        return min_width
    step = max(min_width, 2 if num_rows <= 16 else 4 if num_rows <= 64 else 32)
    return -(-num_rows // step) * step


def build_rows(
    sequences: list[list[SequenceRows]],
    cache: KvCache,
    logit_rows: Int64Array,
    *,
    min_width: int = 2,
) -> Rows:
    """Lay out the rows of one forward.

    sequences:  per group, the rows of neighbouring sequences in cache order
    logit_rows: rows whose logits are wanted, at least one
    min_width:  pad every width to a multiple of this many rows
    """
    flat = [s for group in sequences for s in group]
    num_rows = sum(len(s) for s in flat)
    geometry = [s.positions_and_near() for s in flat]
    token_ids = np.concatenate([s.token_ids for s in flat])
    positions = np.concatenate([p for p, _ in geometry])
    total = padded_width(num_rows, min_width)
    pad = total - num_rows
    logit_pad = padded_width(len(logit_rows), min_width) - len(logit_rows)
    slots = np.concatenate([s.start + np.arange(len(s)) for s in flat])
    owners = np.concatenate([np.full(len(s), s.sequence) for s in flat])
    groups, offset, index = [], 0, 0
    for members in sequences:
        last = members is sequences[-1]
        groups.append(
            _build_group(
                members,
                geometry[index : index + len(members)],
                offset,
                cache,
                single=len(flat) == 1,
                trailing_pad=pad if last else 0,
                min_width=min_width,
            )
        )
        offset += sum(len(s) for s in members)
        index += len(members)

    def to_device(array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(cache.device)

    return Rows(
        token_ids=to_device(np.concatenate([token_ids, np.repeat(token_ids[:1], pad)])),
        positions=to_device(np.concatenate([positions, np.repeat(positions[:1], pad)])),
        num_rows=num_rows,
        key_slots=to_device(cache.key_offsets(owners, slots)),
        value_slots=to_device(cache.value_rows(owners, slots)),
        groups=tuple(groups),
        logit_rows=to_device(np.concatenate([logit_rows, np.repeat(logit_rows[:1], logit_pad)])),
    )


def _build_group(
    members: list[SequenceRows],
    geometry: list[tuple[Int64Array, Int64Array]],
    offset: int,
    cache: KvCache,
    *,
    single: bool,
    trailing_pad: int,
    min_width: int,
) -> Group:
    count, heads = len(members), cache.num_kv_heads
    width = padded_width(max(len(s) for s in members), min_width)
    # Padding repeats the sequence's first row: finite, in range, and never read.
    source = np.zeros((count, width), np.int64)
    positions = np.empty((count, width), np.int64)
    near = np.empty((count, width, NEAR), np.int64)
    scatter, start = [], offset
    for i, (rows, (row_positions, row_near)) in enumerate(zip(members, geometry, strict=True)):
        order = np.zeros(width, np.int64)
        order[: len(rows)] = np.arange(len(rows))
        source[i] = start + order
        positions[i] = row_positions[order]
        near[i] = np.maximum(row_near[order], 0)
        scatter.append(i * width + np.arange(len(rows)))
        start += len(rows)
    scatter.append(np.zeros(trailing_pad, np.int64))
    filled = max(int(s.start) + len(s) for s in members)
    num_blocks = -(-filled // BLOCK)

    # Score buffer layout: [blocks, count, heads, width, group size, BLOCK].
    per_head = width * cache.group_size * BLOCK
    head_base = np.arange(count * heads).reshape(count, heads, 1, 1, 1) * per_head
    row_base = np.arange(width).reshape(width, 1, 1) * cache.group_size * BLOCK
    query_base = np.arange(cache.group_size).reshape(cache.group_size, 1) * BLOCK
    block, within = near[:, None, :, None] // BLOCK, near[:, None, :, None] % BLOCK
    near_scores = block * (count * heads * per_head) + head_base + row_base + query_base + within
    sequence_ids = np.array([s.sequence for s in members])[:, None, None, None]
    near_values = cache.value_row_of(
        sequence_ids, np.arange(heads)[None, :, None, None], near[:, None]
    )

    def to_device(array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(cache.device)

    return Group(
        first=members[0].sequence,
        count=count,
        width=width,
        num_blocks=num_blocks,
        gather=None if single else to_device(source.reshape(-1)),
        scatter=None if single else to_device(np.concatenate(scatter)),
        positions=to_device(positions),
        near_scores=to_device(near_scores),
        near_values=to_device(near_values.reshape(-1)),
    )
