"""Keys and values of all running sequences, in blocks of positions that sequences may share.

keys:   [layers, blocks, kv heads, head size, BLOCK]            (transposed: scores = q @ keys)
values: [layers, blocks, kv heads, BLOCK, head size + ONES]     (ones where stored)
tables: int64 [sequences, blocks of a sequence]; slot s of a sequence lies in block
        tables[sequence, s // BLOCK] at s % BLOCK, which together make a cell: block * BLOCK + at.

Every product over keys has the same inner size BLOCK whatever the context length: kernels split
longer inner sizes differently for different lengths, which would change the rounding. A column of
ones makes the softmax denominator part of the same product; there are ONES of them so that every
row begins at a multiple of 8 bytes (16 in fp32): fp32 kernels round differently at other addresses.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from valuspec.engine.bits import aligned_zeros

#: Positions per block.
BLOCK = 128
#: Columns of ones behind each value.
ONES = 4

Int64Array = NDArray[np.int64]


class KvCache:
    """Cells for `num_blocks` blocks; who may use which is written in `tables` by their owner."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tables: Int64Array,
    ) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.device = device
        self.tables = tables
        heads = (num_layers, num_blocks, num_kv_heads)
        self.keys = self._zeros((*heads, head_size, BLOCK))
        self.values = self._zeros((*heads, BLOCK, head_size + ONES))
        layers = range(num_layers)
        self.layer_keys = [self.keys[i].view(-1) for i in layers]
        self.layer_values = [self.values[i].view(-1, head_size + ONES) for i in layers]

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        # Zeros, not empty: a masked key has weight zero, and zero times garbage may be NaN.
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy leaves zero pages to the system: memory is used when a cell is, not when it could.
        lazy = aligned_zeros((math.prod(shape) * self.dtype.itemsize,), np.uint8)
        return torch.from_numpy(lazy).view(self.dtype).view(shape)

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    def cells(self, sequences: Int64Array, slots: Int64Array) -> Int64Array:
        """Where slots of sequences lie; arguments broadcast."""
        cells: Int64Array = self.tables[sequences, slots // BLOCK] * BLOCK + slots % BLOCK
        return cells

    def key_block(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Keys of `blocks` [count], copied: [count * kv heads, head size, BLOCK]."""
        return self.keys[layer].index_select(0, blocks).view(-1, self.head_size, BLOCK)

    def value_block(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Values of `blocks` [count], copied: [count * kv heads, BLOCK, head size + ONES]."""
        return self.values[layer].index_select(0, blocks).view(-1, BLOCK, self.head_size + ONES)

    def value_row_of(self, head: Int64Array, cells: Int64Array) -> Int64Array:
        """Row of a layer's value store [-1, head size + ONES]; arguments broadcast."""
        rows: Int64Array = (cells // BLOCK * self.num_kv_heads + head) * BLOCK + cells % BLOCK
        return rows

    def value_rows(self, cells: Int64Array) -> Int64Array:
        """Rows for [num_rows] cells and all heads, flattened to [num_rows * kv heads]."""
        return self.value_row_of(np.arange(self.num_kv_heads), cells[:, None]).reshape(-1)

    def key_offsets(self, cells: Int64Array) -> Int64Array:
        """Offsets into a layer's flat key store, [num_rows * kv heads * head size]."""
        rows = self.value_row_of(np.arange(self.num_kv_heads), cells[:, None])
        matrix, within = rows // BLOCK, rows % BLOCK
        size = self.head_size
        offsets = (matrix[..., None] * size + np.arange(size)) * BLOCK + within[..., None]
        flat: Int64Array = offsets.reshape(-1)
        return flat

    def write(
        self,
        layer: int,
        key_offsets: torch.Tensor,
        value_rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store keys and values [num_rows, kv heads, head size] of one layer."""
        self.layer_keys[layer].index_copy_(0, key_offsets, keys.reshape(-1))
        rows = functional.pad(values, (0, ONES), value=1.0).view(-1, self.head_size + ONES)
        self.layer_values[layer].index_copy_(0, value_rows, rows)

    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copy cells, all layers at once; every source is read before any write.

        Commits an accepted path: its keys and values are moved, never computed again.
        """

        def tensor(array: Int64Array) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        keys = self.keys.view(self.num_layers, -1)
        values = self.values.view(self.num_layers, -1, self.head_size + ONES)
        moved_keys = keys.index_select(1, tensor(self.key_offsets(sources)))
        moved_values = values.index_select(1, tensor(self.value_rows(sources)))
        keys.index_copy_(1, tensor(self.key_offsets(targets)), moved_keys)
        values.index_copy_(1, tensor(self.value_rows(targets)), moved_values)


def own_blocks(num_sequences: int, num_slots: int) -> Int64Array:
    """Tables that give each sequence blocks of its own for `num_slots` slots."""
    per_sequence = -(-num_slots // BLOCK)
    return np.arange(num_sequences * per_sequence).reshape(num_sequences, per_sequence)
