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

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine import path_kernels, team
from valuspec.engine.bits import address, aligned_zeros, as_numpy
from valuspec.engine.kv_cache import BLOCK, KvCache
from valuspec.engine.path_kernels import QUERIES, Call, Int64Array
from valuspec.engine.rows import NEAR, Rows

#: Keys of all rows together from which on a second thread is worth waking.
_KEYS_FOR_TEAM = 1000


class PathAttention:
    """Attention of one forward over a bf16 or fp32 cache in main memory.

    floats_of_scratch: working memory a thread needs, in fp32 numbers
    """

    def __init__(self, rows: Rows, cache: KvCache) -> None:
        self.cache = cache
        self._rows = rows
        self._cells = np.empty(rows.num_rows, np.int64)
        self._groups = np.empty((rows.num_rows, 2), np.int64)
        self._num_groups, self._longest, self._num_keys = path_kernels.plan(
            rows.paths, rows.slots, rows.counts, cache.tables, BLOCK,
            max(1, QUERIES // cache.group_size), self._cells, self._groups,
        )  # fmt: skip
        if self._num_groups < 0:
            raise IndexError(f"row {self._longest} lies beyond the blocks of its sequence")
        self.floats_of_scratch = path_kernels.floats_of_scratch(
            max(QUERIES, cache.group_size), cache.head_size, BLOCK, self._longest
        )
        self._paths: dict[int | None, Int64Array] = {None: rows.paths}

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        self.store(layer, qkv)
        alone = self._alone
        call = alone.calls[layer : layer + 1]
        call["qkv"], call["softcap"] = qkv.data_ptr(), softcap or 0.0
        call["paths"] = self.write(call, [window])
        alone.taken[:] = 0
        team.run(alone.work.address, call.ctypes.data, alone.num_threads)
        return alone.out

    def store(self, layer: int, qkv: torch.Tensor) -> None:
        """Store the rows' keys and values; qkv: as in `attend`."""
        path_kernels.store(
            as_numpy(qkv), as_numpy(self.cache.keys[layer]), as_numpy(self.cache.values[layer]),
            self._cells,
        )  # fmt: skip

    @cached_property
    def _alone(self) -> _Alone:
        return _Alone(self._rows, self.cache, self.floats_of_scratch, self._num_keys)

    def write(self, calls: NDArray[np.void], windows: Sequence[int | None]) -> Int64Array:
        """Tell calls, for any layers, of the rows; valid as long as this object.

        Returns for each sliding window the address of the rows' paths through it.
        """
        calls["near"] = address(self._rows.near)
        calls["cells"], calls["groups"] = address(self._cells), address(self._groups)
        calls["num_rows"], calls["num_groups"] = self._rows.num_rows, self._num_groups
        calls["longest"], calls["floats_each"] = self._longest, self.floats_of_scratch
        return np.array([address(self._through(window)) for window in windows])

    def _through(self, window: int | None) -> Int64Array:
        """The rows' paths as seen through a sliding window; the same few for all layers."""
        if window not in self._paths:
            paths = self._paths[window] = self._rows.paths.copy()
            paths[2] = np.maximum(0, paths[3] - window)
        return self._paths[window]


class _Alone:
    """What attention brings along when each layer calls it by itself."""

    def __init__(self, rows: Rows, cache: KvCache, floats_of_scratch: int, num_keys: int) -> None:
        # Rows of padding stay zero: finite, and never read.
        num_heads = cache.group_size * cache.num_kv_heads
        self.out = torch.zeros(
            (len(rows.token_ids), num_heads * cache.head_size), dtype=cache.dtype
        )
        self.num_threads = torch.get_num_threads() if num_keys >= _KEYS_FOR_TEAM else 1
        self._scratch = aligned_zeros((self.num_threads, floats_of_scratch), np.float32)
        self.taken = np.zeros(3, np.int64)
        self.work = path_kernels.entry(as_numpy(cache.keys).dtype.type)
        self.calls = np.zeros(cache.num_layers, np.dtype(Call))
        describe(cache, self.calls)
        self.calls["out"], self.calls["taken"] = self.out.data_ptr(), self.taken.ctypes.data
        self.calls["scratch"] = self._scratch.ctypes.data


def describe(cache: KvCache, calls: NDArray[np.void]) -> None:
    """Tell calls, one for each layer, of the cache."""
    layers = np.arange(len(calls))
    for name, stored in (("keys", as_numpy(cache.keys)), ("values", as_numpy(cache.values))):
        calls[name] = stored.ctypes.data + layers * stored.strides[0]
    calls["tables"] = cache.tables.ctypes.data
    calls["num_sequences"], calls["blocks_each"] = cache.tables.shape
    calls["num_heads"] = cache.group_size * cache.num_kv_heads
    calls["num_kv_heads"], calls["head_size"] = cache.num_kv_heads, cache.head_size
    calls["value_size"] = cache.values.shape[-1]
    calls["num_blocks"], calls["block_size"] = cache.num_blocks, BLOCK
    calls["num_near"] = NEAR
