"""Attention on a CPU, every row along its own path: exact by construction.

A row attends to the keys of its path in position order: the committed ones, which lie in position
order in the cache, and then those of the rows above it in the tree. All arithmetic is fp32 in one
fixed order, multiply and add fused,

    score_k  = q_3 k_3 + (q_2 k_2 + (q_1 k_1 + (q_0 k_0)))    and so on over the head size
    weight_k = exp(score_k - max) / total                     exp is one polynomial
    total    = sum over 16 lanes of the sum over the keys in the lane, which is k modulo 16
    output   = w_2 v_2 + (w_1 v_1 + (w_0 v_0))                and so on over positions

and each sum runs over something that belongs to the row alone. So the bits do not depend on the
tree, on batch mates, on the number of rows, or on whether a key was committed or in the tree. The
vectors run across keys in the first line and across the head in the last; without fast-math the
compiler may not reorder a sum.

Rows of one sequence share the work of turning stored keys and values into fp32, block after block,
and the sums of several queries stay in registers while it passes by. For the few rows of a decoding
step this takes a fraction of the time of matrix products, whose fixed costs dominate there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine import path_kernels, team
from valuspec.engine.bits import aligned_zeros, as_numpy
from valuspec.engine.kv_cache import BLOCK, KvCache
from valuspec.engine.path_kernels import QUERIES, Call, Int64Array
from valuspec.engine.rows import NEAR, Rows

#: Keys of all rows together from which on a second thread is worth waking.
_KEYS_FOR_TEAM = 1000


class PathAttention:
    """Attention of one forward over a bf16 or fp32 cache in main memory."""

    def __init__(self, rows: Rows, cache: KvCache) -> None:
        self.cache = cache
        self._rows = rows
        self._keys = as_numpy(cache.keys)
        self._values = as_numpy(cache.values)
        self._cells = cache.cells(rows.sequences, rows.slots)
        self._paths: dict[int | None, Int64Array] = {}
        # Rows of padding stay zero: finite, and never read.
        num_heads = cache.group_size * cache.num_kv_heads
        shape = (len(rows.token_ids), num_heads * cache.head_size)
        self._out = torch.zeros(shape, dtype=cache.dtype)

        enough = int(rows.lengths.sum()) >= _KEYS_FOR_TEAM
        self._num_threads = torch.get_num_threads() if enough else 1
        self._groups = _groups(rows, cache.group_size)
        longest = int(rows.lengths.max())
        per_head = max(QUERIES, cache.group_size)
        floats = path_kernels.floats_of_scratch(per_head, cache.head_size, BLOCK, longest)
        self._scratch = aligned_zeros((self._num_threads, floats), np.float32)
        self._taken = np.zeros(3, np.int64)
        self._near = np.ascontiguousarray(rows.near)
        self._work = path_kernels.entry(self._keys.dtype.type)
        self._call = Call(
            taken=self._taken.ctypes.data,
            out=self._out.data_ptr(),
            tables=cache.tables.ctypes.data,
            near=self._near.ctypes.data,
            cells=self._cells.ctypes.data,
            groups=self._groups.ctypes.data,
            scratch=self._scratch.ctypes.data,
            num_rows=rows.num_rows,
            num_heads=num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_size=cache.head_size,
            value_size=cache.values.shape[-1],
            num_blocks=cache.num_blocks,
            block_size=BLOCK,
            num_sequences=cache.tables.shape[0],
            blocks_each=cache.tables.shape[1],
            num_near=NEAR,
            num_groups=len(self._groups),
            longest=longest,
            floats_each=floats,
        )

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        keys, values = self._keys[layer], self._values[layer]
        path_kernels.store(as_numpy(qkv), keys, values, self._cells)
        call = self._call
        call.qkv = qkv.data_ptr()
        call.keys, call.values = keys.ctypes.data, values.ctypes.data
        call.paths = self._through(window).ctypes.data
        call.softcap = softcap or 0.0
        self._taken[:] = 0
        team.run(self._work.address, ctypes.addressof(call), self._num_threads)
        return self._out

    def prepare(
        self, calls: NDArray[np.void], qkv: int, windows: Sequence[int | None], num_threads: int
    ) -> torch.Tensor:
        """Write down what `store_entry` and `entry` are to be given for each layer.

        calls: [layers] of `Call`, valid as long as this object; qkv: address of what `attend` takes
        windows: by layer; num_threads: most that will come
        Returns where every layer's output will be, [padded rows, heads * head size].
        """
        layers = np.arange(len(calls))
        self._taken = np.zeros((len(calls), 3), np.int64)
        self._scratch = aligned_zeros((num_threads, self._call.floats_each), np.float32)
        self._call.qkv, self._call.scratch = qkv, self._scratch.ctypes.data
        calls[:] = np.frombuffer(bytes(self._call), calls.dtype)
        for name, of_layers in (
            ("taken", self._taken),
            ("keys", self._keys),
            ("values", self._values),
        ):
            calls[name] = of_layers.ctypes.data + layers * of_layers.strides[0]
        calls["paths"] = [self._through(window).ctypes.data for window in windows]
        return self._out

    def _through(self, window: int | None) -> Int64Array:
        """The rows' paths as seen through a sliding window; the same few for all layers."""
        if window not in self._paths:
            rows = self._rows
            lowest = np.zeros_like(rows.lengths)
            if window is not None:
                lowest = np.maximum(0, rows.lengths - window)
            self._paths[window] = np.stack([rows.sequences, rows.starts, lowest, rows.lengths])
        return self._paths[window]


def _groups(rows: Rows, group_size: int) -> Int64Array:
    """int64 [groups, 2]: rows of one sequence, as many as share a block turned into fp32."""
    most = max(1, QUERIES // group_size)
    groups, first = [], 0
    for member in rows.members:
        end = first + len(member)
        groups += [(low, min(low + most, end)) for low in range(first, end, most)]
        first = end
    return np.array(groups, np.int64)
