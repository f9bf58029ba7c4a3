"""Keys and values of all running sequences, in blocks of positions.

keys:   [layers, blocks, sequences, kv heads, head size, BLOCK]      (transposed: scores = q @ keys)
values: [layers, blocks, sequences, kv heads, BLOCK, head size + ONES]  (ones where stored)

Blocks come before sequences so that a layer's block of the running sequences, which always occupy
the first places, is one contiguous batch of matrices. Every product over keys therefore has the
same inner size BLOCK whatever the context length: kernels split longer inner sizes differently for
different lengths, which would change the rounding. A column of ones makes the softmax denominator
part of the same product; there are ONES of them so that every row begins at a multiple of 8 bytes
(16 in fp32): fp32 kernels round differently at other addresses.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from valuspec.engine.bits import aligned_zeros

#: Positions per block.
BLOCK = 256
#: Columns of ones behind each value.
ONES = 4

Int64Array = NDArray[np.int64]


class KvCache:
    """Slots for `num_sequences` sequences; slot == position once committed."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_sequences: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_sequences = num_sequences
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.device = device
        self.keys = self._blocks(1, head_size, BLOCK)
        self.values = self._blocks(1, BLOCK, head_size + ONES)
        self._bind_layers()

    def _blocks(self, num_blocks: int, rows: int, columns: int) -> torch.Tensor:
        # Zeros, not empty: a masked key has weight zero, and zero times garbage may be NaN.
        shape = (self.num_layers, num_blocks, self.num_sequences, self.num_kv_heads, rows, columns)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy leaves zero pages to the system: memory is used when a slot is, not when it could.
        lazy = aligned_zeros((math.prod(shape) * self.dtype.itemsize,), np.uint8)
        return torch.from_numpy(lazy).view(self.dtype).view(shape)

    def _bind_layers(self) -> None:
        layers = range(self.num_layers)
        self.layer_keys = [self.keys[i].view(-1) for i in layers]
        self.layer_values = [self.values[i].view(-1, self.head_size + ONES) for i in layers]

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    def reserve(self, num_slots: int) -> None:
        """Make room for `num_slots` slots per sequence; grows by doubling, keeps what is stored."""
        needed, present = -(-num_slots // BLOCK), self.num_blocks
        if needed <= present:
            return
        keys, values = self.keys, self.values
        self.keys = self._blocks(max(needed, 2 * present), self.head_size, BLOCK)
        self.values = self._blocks(max(needed, 2 * present), BLOCK, self.head_size + ONES)
        self.keys[:, :present] = keys
        self.values[:, :present] = values
        self._bind_layers()

    def key_block(self, layer: int, block: int, first: int, count: int) -> torch.Tensor:
        """Keys [count * kv heads, head size, BLOCK] of one block of neighbouring sequences."""
        return self.keys[layer, block, first : first + count].view(-1, self.head_size, BLOCK)

    def value_block(self, layer: int, block: int, first: int, count: int) -> torch.Tensor:
        """Values [count * kv heads, BLOCK, head size + ONES] of one block."""
        return self.values[layer, block, first : first + count].view(
            -1, BLOCK, self.head_size + ONES
        )

    def value_row_of(self, sequence: Int64Array, head: Int64Array, slot: Int64Array) -> Int64Array:
        """Row of a layer's value store [-1, head size + ONES]; arguments broadcast."""
        block, within = slot // BLOCK, slot % BLOCK
        head_row = (block * self.num_sequences + sequence) * self.num_kv_heads + head
        rows: Int64Array = head_row * BLOCK + within
        return rows

    def value_rows(self, sequences: Int64Array, slots: Int64Array) -> Int64Array:
        """Rows for [num_rows] slots and all heads, flattened to [num_rows * kv heads]."""
        heads = np.arange(self.num_kv_heads)
        return self.value_row_of(sequences[:, None], heads, slots[:, None]).reshape(-1)

    def key_offsets(self, sequences: Int64Array, slots: Int64Array) -> Int64Array:
        """Offsets into a layer's flat key store, [num_rows * kv heads * head size]."""
        heads = np.arange(self.num_kv_heads)
        rows = self.value_row_of(sequences[:, None], heads, slots[:, None])
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

    def move(self, sequences: Int64Array, sources: Int64Array, targets: Int64Array) -> None:
        """Copy slots within sequences, all layers at once; every source is read before any write.

        Commits an accepted path: its keys and values are moved, never computed again.
        """

        def tensor(array: Int64Array) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        keys = self.keys.view(self.num_layers, -1)
        values = self.values.view(self.num_layers, -1, self.head_size + ONES)
        moved_keys = keys.index_select(1, tensor(self.key_offsets(sequences, sources)))
        moved_values = values.index_select(1, tensor(self.value_rows(sequences, sources)))
        keys.index_copy_(1, tensor(self.key_offsets(sequences, targets)), moved_keys)
        values.index_copy_(1, tensor(self.value_rows(sequences, targets)), moved_values)

    def move_sequence(self, source: int, target: int, num_slots: int) -> None:
        """Copy the first slots of a sequence to another place: the running ones stay neighbours."""
        blocks = -(-num_slots // BLOCK)
        self.keys[:, :blocks, target] = self.keys[:, :blocks, source]
        self.values[:, :blocks, target] = self.values[:, :blocks, source]
