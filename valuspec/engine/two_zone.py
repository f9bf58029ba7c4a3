"""Two-zone attention by matrix products, for accelerators (any device, any dtype).

A query at position p attends to

- the far zone, positions <= p - NEAR, in position order from the cache, and
- the near zone, positions p - NEAR + 1 .. p, gathered along the row's own path, in position order.

Which zone a key falls in depends on p alone, so one-token decoding and any tree do the same
arithmetic for the same token. A tree of depth < NEAR never reaches into its own far zone.

Every reduction here is a matrix product of fixed inner size (head size, NEAR or BLOCK), or a
maximum, which does not round. Blocks are added one after the other in position order; a block that
a row may not see contributes exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine.kv_cache import BLOCK, ONES, KvCache
from valuspec.engine.rows import NEAR, Rows, SequenceRows, padded_width

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose attention runs as one batch of equally many (padded) rows.

    count:        how many sequences
    width:        rows per sequence, padding included
    blocks:       int64 [num_blocks, count], the sequences' blocks in position order; a shorter
                  sequence has any block where it has none
    gather:       int64 [count * width] rows to take, or None when the rows are already so laid out
    rows, places: int64 [rows of the group], where its rows are in the forward and in the batch
    positions:    int64 [count, width]
    near_scores:  int64 [count, heads, width, group size, NEAR] offsets into the score buffer
    near_values:  int64 [count * heads * width * NEAR] rows of a layer's value store
    """

    count: int
    width: int
    blocks: torch.Tensor
    gather: torch.Tensor | None
    rows: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    near_scores: torch.Tensor
    near_values: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

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


class TwoZoneAttention:
    """Attention of one forward; `attend` is called once per layer, in order."""

    def __init__(self, rows: Rows, cache: KvCache) -> None:
        self.cache = cache
        self._num_rows = rows.num_rows
        cells = cache.cells(rows.sequences, rows.slots)
        self._key_slots = _to_device(cache.key_offsets(cells), cache)
        self._value_slots = _to_device(cache.value_rows(cells), cache)
        self._groups = _build_groups(rows, cache)
        self._masks: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scores = [
            torch.empty(
                (g.num_blocks, g.count * cache.num_kv_heads, g.width * cache.group_size, BLOCK),
                dtype=cache.dtype,
                device=cache.device,
            )
            for g in self._groups
        ]

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        n, kv_heads = self._num_rows, self.cache.num_kv_heads
        query, key = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads]
        value = qkv[:, -kv_heads:]
        self.cache.write(layer, self._key_slots, self._value_slots, key[:n], value[:n])
        result = qkv.new_zeros(len(qkv), query.shape[1] * query.shape[2])
        for index, group in enumerate(self._groups):
            q = query if group.gather is None else query.index_select(0, group.gather)
            out = self._attend_group(index, group, layer, q, window, softcap)
            if group.gather is None:
                return out
            result.index_copy_(0, group.rows, out.index_select(0, group.places))
        return result

    def _attend_group(
        self,
        index: int,
        group: Group,
        layer: int,
        query: torch.Tensor,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        cache = self.cache
        count, width, size = group.count, group.width, cache.head_size
        heads, per_head = cache.num_kv_heads, cache.group_size
        q = query.view(count, width, heads, per_head, size).transpose(1, 2)
        q = q.reshape(count * heads, width * per_head, size)

        scores = self._scores[index]
        for block in range(group.num_blocks):
            keys = cache.key_block(layer, group.blocks[block])
            torch.bmm(q, keys, out=scores[block])
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        near = scores.view(-1).take(group.near_scores)
        far_mask, near_mask = self._mask(index, group, window)
        shape = (group.num_blocks, count, heads, width, per_head, BLOCK)
        scores.view(shape).add_(far_mask)
        near.add_(near_mask)
        near = near.view(count * heads, width * per_head, NEAR)

        peak = torch.maximum(scores.amax((0, 3)), near.amax(2)).unsqueeze_(2)
        far = scores.sub_(peak).exp_()
        near = near.sub_(peak).exp_()

        near_values = cache.layer_values[layer].index_select(0, group.near_values)
        near_out = torch.bmm(
            near.view(count * heads * width, per_head, NEAR),
            near_values.view(count * heads * width, NEAR, size + ONES),
        )
        total = near_out.float().view(count * heads, width * per_head, size + ONES)
        for block in range(group.num_blocks):
            total += torch.bmm(far[block], cache.value_block(layer, group.blocks[block]))
        out = (total[..., :size] / total[..., size : size + 1]).to(cache.dtype)
        out = out.view(count, heads, width, per_head, size).transpose(1, 2)
        return out.reshape(count * width, heads * per_head * size)

    def _mask(
        self, index: int, group: Group, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks depend on the layer only through its window: build each once per forward."""
        found = self._masks.get((index, window))
        if found is None:
            found = self._masks[index, window] = group.masks(window, self.cache.dtype)
        return found


def _build_groups(rows: Rows, cache: KvCache) -> list[Group]:
    """Sequences of equally many rows, padding included, go together."""
    by_width: dict[int, list[tuple[int, SequenceRows]]] = {}
    first = 0
    for member in rows.members:
        width = padded_width(len(member), rows.min_width)
        by_width.setdefault(width, []).append((first, member))
        first += len(member)
    return [_build_group(rows, cache, width, members) for width, members in by_width.items()]


def _build_group(
    rows: Rows, cache: KvCache, width: int, members: list[tuple[int, SequenceRows]]
) -> Group:
    """members: first row and rows of each; a sequence alone keeps the padded layout of `rows`."""
    count, heads = len(members), cache.num_kv_heads
    # Padding repeats the sequence's first row: finite, in range, and never read.
    source = np.empty((count, width), np.int64)
    taken, places = [], []
    for i, (first, member) in enumerate(members):
        source[i] = first
        source[i, : len(member)] += np.arange(len(member))
        taken.append(first + np.arange(len(member)))
        places.append(i * width + np.arange(len(member)))
    positions = rows.lengths[source] - 1
    near = np.maximum(rows.near[source], 0)
    num_blocks = -(-max(m.start + len(m) for _, m in members) // BLOCK)
    sequences = np.array([member.sequence for _, member in members])

    # Score buffer layout: [blocks, count, heads, width, group size, BLOCK].
    per_head = width * cache.group_size * BLOCK
    head_base = np.arange(count * heads).reshape(count, heads, 1, 1, 1) * per_head
    row_base = np.arange(width).reshape(width, 1, 1) * cache.group_size * BLOCK
    query_base = np.arange(cache.group_size).reshape(cache.group_size, 1) * BLOCK
    block, within = near[:, None, :, None] // BLOCK, near[:, None, :, None] % BLOCK
    near_scores = block * (count * heads * per_head) + head_base + row_base + query_base + within
    cells = cache.cells(sequences[:, None, None, None], near[:, None])
    near_values = cache.value_row_of(np.arange(heads)[None, :, None, None], cells)
    alone = len(rows.members) == 1
    return Group(
        count=count,
        width=width,
        blocks=_to_device(cache.tables[sequences, :num_blocks].T, cache),
        gather=None if alone else _to_device(source.reshape(-1), cache),
        rows=_to_device(np.concatenate(taken), cache),
        places=_to_device(np.concatenate(places), cache),
        positions=_to_device(positions, cache),
        near_scores=_to_device(near_scores, cache),
        near_values=_to_device(near_values.reshape(-1), cache),
    )


def _to_device(array: Int64Array, cache: KvCache) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(cache.device)
