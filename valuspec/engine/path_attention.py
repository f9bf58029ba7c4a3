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
compiler vectorises across keys in the first line and across the head in the last; without
fast-math it may not reorder a sum.

Rows of one sequence share the work of turning stored keys and values into fp32, block after block,
and three queries at a time share the loads of a block. For the few rows of a decoding step this
takes a fraction of the time of matrix products, whose fixed costs dominate there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache as memoize
from itertools import pairwise

import numpy as np
import torch

from valuspec.engine import path_kernels
from valuspec.engine.bits import as_numpy
from valuspec.engine.kv_cache import BLOCK, KvCache
from valuspec.engine.path_kernels import Paths, Scratch
from valuspec.engine.rows import Rows

#: Keys of all rows together that are worth a thread: for fewer, waking it takes as long.
_KEYS_PER_THREAD = 8000


class PathAttention:
    """Attention of one forward over a bf16 or fp32 cache in main memory."""

    def __init__(self, rows: Rows, cache: KvCache) -> None:
        self.cache = cache
        self._rows = rows
        self._keys = as_numpy(cache.keys)
        self._values = as_numpy(cache.values)
        self._cells = cache.cells(rows.sequences, rows.slots)
        # Later rows of a prompt have more keys: each thread gets as many keys, not rows.
        keys_before = np.cumsum(rows.lengths)
        num_threads = int(keys_before[-1]) // _KEYS_PER_THREAD
        num_threads = max(1, min(torch.get_num_threads(), num_threads))
        shares = keys_before[-1] * np.arange(1, num_threads) // num_threads
        bounds = [0, *np.searchsorted(keys_before, shares).tolist(), rows.num_rows]
        longest = int(rows.lengths.max())
        self._shares = [
            (*Scratch.allocate(cache.group_size, cache.head_size, BLOCK, longest), first, last)
            for first, last in pairwise(bounds)
        ]
        self._paths: dict[int | None, Paths] = {}
        # Rows of padding stay zero: finite, and never read.
        num_heads = cache.group_size * cache.num_kv_heads
        shape = (len(rows.token_ids), num_heads * cache.head_size)
        self._out = torch.zeros(shape, dtype=cache.dtype)
        self._out_array = as_numpy(self._out).reshape(len(rows.token_ids), num_heads, -1)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        keys, values, rows = self._keys[layer], self._values[layer], as_numpy(qkv)
        path_kernels.store(rows, keys, values, self._cells)
        arguments = (
            rows,
            keys,
            values,
            *self._through(window),
            float(softcap or 0.0),
            self._out_array,
        )
        others, mine = self._shares[1:], self._shares[0]
        waiting = [_pool().submit(path_kernels.attend, *arguments, *share) for share in others]
        path_kernels.attend(*arguments, *mine)
        for other in waiting:
            other.result()
        return self._out

    def _through(self, window: int | None) -> Paths:
        """The rows' paths as seen through a sliding window; the same few for all layers."""
        if window not in self._paths:
            rows = self._rows
            lowest = np.zeros_like(rows.lengths)
            if window is not None:
                lowest = np.maximum(0, rows.lengths - window)
            self._paths[window] = Paths(
                self.cache.tables, rows.sequences, rows.starts, lowest, rows.lengths, rows.near
            )
        return self._paths[window]


@memoize
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads() - 1))
