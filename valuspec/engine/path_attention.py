"""Attention on a CPU, one row at a time along its own path: exact by construction.

A row attends to the keys of its path in position order: the committed ones, which lie in position
order in the cache, and then those of the rows above it in the tree. All arithmetic is fp32 in one
fixed order,

    score_k  = ((q_0 * k_0 + q_1 * k_1) + q_2 * k_2) + ..      over the head size
    weight_k = exp(score_k - max)                              one polynomial
    output   = ((w_0 * v_0 + w_1 * v_1) + ..) / (w_0 + w_1 + ..)   over positions

and each sum runs over something that belongs to the row alone. So the bits do not depend on the
tree, on batch mates, on the number of rows, or on whether a key was committed or in the tree. The
compiler vectorises across keys in the first line and across the head in the last, and without
fast-math it may neither reorder a sum nor fuse multiply and add.

For the few rows of a decoding step this takes a fraction of the time of matrix products, whose
fixed costs dominate there.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache as memoize
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from valuspec.engine.bits import as_numpy
from valuspec.engine.kv_cache import KvCache
from valuspec.engine.rows import Rows
from valuspec.jit import kernel

#: Fewer rows are not worth a second thread.
_ROWS_PER_THREAD = 16


class PathAttention:
    """Attention of one forward over a bf16 or fp32 cache in main memory."""

    def __init__(self, rows: Rows, cache: KvCache) -> None:
        self.cache = cache
        self._rows = rows
        self._keys = as_numpy(cache.keys)
        self._values = as_numpy(cache.values)
        self._scratch = [
            np.empty((cache.group_size, int(rows.lengths.max())), np.float32)
            for _ in range(_threads_for(rows.num_rows))
        ]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        rows, cache = self._rows, self.cache
        keys, values = self._keys[layer], self._values[layer]
        _store(as_numpy(key), as_numpy(value), keys, values, rows.sequences, rows.slots)
        out = torch.empty(query.shape, dtype=torch.float32)
        arguments = (
            query.float().numpy(),
            keys,
            values,
            rows.sequences,
            rows.starts,
            rows.lengths,
            rows.near,
            float(window or math.inf),
            float(softcap or 0.0),
            out.numpy(),
        )
        step = len(self._scratch)
        others = [
            _pool().submit(_attend, *arguments, self._scratch[i], i, step) for i in range(1, step)
        ]
        _attend(*arguments, self._scratch[0], 0, step)
        for other in others:
            other.result()
        out[rows.num_rows :] = 0  # padding: finite, and never read
        return out.view(len(query), -1).to(cache.dtype)


def _threads_for(num_rows: int) -> int:
    return max(1, min(torch.get_num_threads(), num_rows // _ROWS_PER_THREAD))


@memoize
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads() - 1))


def _widen(bits: Any) -> Any:
    """A stored number as fp32; `_compile_widen` says how."""
    raise NotImplementedError


@overload(_widen)
def _compile_widen(bits: Any) -> Any:
    if isinstance(bits, types.Float):

        def widen(bits: Any) -> Any:
            return bits

    else:

        def widen(bits: Any) -> Any:
            return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

    return widen


@kernel
def _store(key: Any, value: Any, keys: Any, values: Any, sequences: Any, slots: Any) -> None:
    """Write the rows' keys and values; layouts as in KvCache."""
    heads, size, block_size = keys.shape[2], keys.shape[3], keys.shape[4]
    for row in range(slots.size):
        block, within = slots[row] // block_size, slots[row] % block_size
        for head in range(heads):
            for d in range(size):
                keys[block, sequences[row], head, d, within] = key[row, head, d]
                values[block, sequences[row], head, within, d] = value[row, head, d]


@kernel
def _exp(x: Any) -> Any:
    """e^x in fp32 for x <= 0; Cephes' expf polynomial (error below 2 ulp)."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    f = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * f * f + f + np.float32(1.0)) * power


@kernel
def _attend(
    query: Any,
    keys: Any,
    values: Any,
    sequences: Any,
    starts: Any,
    lengths: Any,
    near: Any,
    window: float,
    softcap: float,
    out: Any,
    scratch: Any,
    first: int,
    step: int,
) -> None:
    """Rows first, first + step, ..: out[row] = attention of query[row].

    Key j of a row is slot j below `starts[row]`, and above it the row's path: the last
    `lengths - starts` entries of `near[row]`.
    """
    heads, block_size = keys.shape[2], keys.shape[4]
    group = query.shape[1] // heads
    for row in range(first, sequences.size, step):
        sequence, start, length = sequences[row], starts[row], lengths[row]
        path = near[row, near.shape[1] - (length - start) :]
        lowest = 0 if window >= length else np.int64(length - window)
        for head in range(heads):
            for g in range(group):
                q, result = query[row, head * group + g], out[row, head * group + g]
                score = scratch[g, lowest:length]
                score[:] = np.float32(0)
                at = lowest
                while at < length:
                    block, low, count = _run(at, start, path, block_size)
                    part = score[at - lowest : at - lowest + count]
                    _add_scores(part, q, keys[block, sequence, head], low)
                    at += count
                if softcap > 0:
                    for j in range(score.size):
                        score[j] = np.float32(softcap * math.tanh(score[j] / softcap))
                total = _soften(score)
                result[:] = np.float32(0)
                at = lowest
                while at < length:
                    block, low, count = _run(at, start, path, block_size)
                    part = score[at - lowest : at - lowest + count]
                    _add_values(result, part, values[block, sequence, head], low)
                    at += count
                for d in range(result.size):
                    result[d] /= total


@kernel
def _run(at: Any, start: Any, path: Any, block_size: int) -> tuple[int, int, int]:
    """(block, first slot within it, keys in a row) of the run of neighbours that key `at` begins.

    Below `start` a run reaches to the block's end; along the tree every key stands alone.
    """
    if at < start:
        low = at % block_size
        return at // block_size, low, min(block_size - low, start - at)
    slot = path[at - start]
    return slot // block_size, slot % block_size, 1


@kernel
def _add_scores(score: Any, q: Any, k: Any, low: int) -> None:
    """score[j] += q . k[:, low + j], product after product; four at a time spare memory traffic.

    Rows of k are sliced one by one: only then does the compiler know them contiguous.
    """
    high = low + score.size
    whole = q.size - q.size % 4
    for d in range(0, whole, 4):
        q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
        k0, k1, k2, k3 = k[d][low:high], k[d + 1][low:high], k[d + 2][low:high], k[d + 3][low:high]
        for j in range(score.size):
            partial = (score[j] + q0 * _widen(k0[j])) + q1 * _widen(k1[j])
            score[j] = (partial + q2 * _widen(k2[j])) + q3 * _widen(k3[j])
    for d in range(whole, q.size):
        kd = k[d][low:high]
        for j in range(score.size):
            score[j] += q[d] * _widen(kd[j])


@kernel
def _soften(score: Any) -> Any:
    """Turn scores into exp(score - max), and return their sum."""
    peak = score[0]
    for j in range(score.size):
        peak = max(peak, score[j])
    for j in range(score.size):
        score[j] = _exp(score[j] - peak)
    total = np.float32(0)
    for j in range(score.size):
        total += score[j]
    return total


@kernel
def _add_values(result: Any, weight: Any, v: Any, low: int) -> None:
    """result += weight[j] * v[low + j], key after key; four at a time spare memory traffic."""
    whole = weight.size - weight.size % 4
    for j in range(0, whole, 4):
        w0, w1, w2, w3 = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
        v0, v1, v2, v3 = v[low + j], v[low + j + 1], v[low + j + 2], v[low + j + 3]
        for d in range(result.size):
            partial = (result[d] + w0 * _widen(v0[d])) + w1 * _widen(v1[d])
            result[d] = (partial + w2 * _widen(v2[d])) + w3 * _widen(v3[d])
    for j in range(whole, weight.size):
        vj = v[low + j]
        for d in range(result.size):
            result[d] += weight[j] * _widen(vj[d])
