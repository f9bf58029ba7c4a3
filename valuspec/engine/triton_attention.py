"""Two-zone attention in three kernels a layer, for CUDA devices.

The two zones are those of `two_zone`: positions up to p - NEAR in position order from the cache,
the last NEAR along the row's own path. Everything the kernels need to know of a forward's rows
lies in two buffers, which may be filled again for other rows of the same width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine import triton_kernels
from valuspec.engine.kv_cache import BLOCK, ONES, Int64Array, KvCache, own_blocks
from valuspec.engine.rows import NEAR, Rows, SequenceRows, build_rows

#: Queries of one tile, a power of two: heads of a group for several rows of one sequence.
TILE = 32
#: Keys of one product in the far zone; a power of two, at most BLOCK.
PRODUCT = 64
#: Positions of the far zone that one program goes through; a multiple of PRODUCT. Fixed: where
#: sums are split must not depend on how long a context is or how busy the device is.
SLICE = 512
#: A window that hides nothing.
_ALL = 2**30


class TritonAttention:
    """Attention of one forward over a cache in device memory."""

    def __init__(self, rows: Rows, cache: KvCache) -> None:
        self.cache = cache
        width = len(rows.token_ids)
        num_slices, num_heads = self.capacity(rows), cache.num_kv_heads * cache.group_size
        self._grid = (width, cache.num_kv_heads)
        self._num_slices = num_slices

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=cache.device)

        self._plan = empty(4 + NEAR, width, dtype=torch.int32)
        self._tables = empty(*cache.tables.shape, dtype=torch.int32)
        self._sums = empty(num_slices, width, num_heads, cache.head_size, dtype=torch.float32)
        self._weights = empty(num_slices, width, num_heads, dtype=torch.float32)
        self._peaks = torch.empty_like(self._weights)
        self._out = empty(width, num_heads * cache.head_size, dtype=cache.dtype)
        self._sizes: dict[str, Any] = {
            "group": cache.group_size,
            "num_kv_heads": cache.num_kv_heads,
            "size": cache.head_size,
            "size_pad": max(16, _power_of_two(cache.head_size)),
            "block": BLOCK,
            "ones": ONES,
        }
        self.refill(rows)

    @classmethod
    def try_out(cls, device: torch.device, dtype: torch.dtype) -> None:
        """Attend for one row; raises whatever Triton does where it cannot compile or launch."""
        cache = KvCache(
            num_layers=1,
            num_blocks=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=16,
            dtype=dtype,
            device=device,
            tables=own_blocks(1, BLOCK),
        )
        chain = SequenceRows.chain(0, NEAR, np.zeros(1, np.int64))
        rows = build_rows([chain], np.zeros(1, np.int64), device)
        qkv = torch.zeros(len(rows.token_ids), 3, cache.head_size, dtype=dtype, device=device)
        cls(rows, cache).attend(0, qkv)

    @staticmethod
    def capacity(rows: Rows) -> int:
        """Slices to make room for: a power of two that holds the longest far zone, or 0."""
        needed = -(-(int(rows.lengths.max()) - NEAR) // SLICE)
        return 1 << (needed - 1).bit_length() if needed > 0 else 0

    def refill(self, rows: Rows) -> None:
        """Attend for other rows from now on, of the same padded width and capacity."""
        self._plan.copy_(torch.from_numpy(row_plan(rows, self.cache, self._grid[0])))
        self._tables.copy_(torch.from_numpy(self.cache.tables.astype(np.int32)))

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        cache, width = self.cache, self._grid[0]
        keys, values = cache.keys[layer], cache.values[layer]
        positions, cells, sequences, tile_rows = self._plan[:4]
        partial = (self._sums, self._weights, self._peaks)
        shown = _ALL if window is None else window
        zones = self._sizes | {"softcap": softcap or 0.0, "near": NEAR, "slice_keys": SLICE}
        triton_kernels.store_rows[self._grid](qkv, keys, values, cells, **self._sizes)
        if self._num_slices:
            triton_kernels.far_zone[(*self._grid, self._num_slices)](
                *(qkv, keys, values, positions, sequences, tile_rows, self._tables, *partial),
                *(width, cache.tables.shape[1], shown),
                group_pad=_power_of_two(cache.group_size),
                rows_per_tile=_rows_per_tile(cache),
                product=PRODUCT,
                **zones,
            )
        triton_kernels.near_zone[self._grid](
            *(qkv, keys, values, positions, cells, self._plan[4:], *partial, self._out),
            *(width, shown),
            group_rows=max(16, _power_of_two(cache.group_size)),
            **zones,
        )
        return self._out


def row_plan(rows: Rows, cache: KvCache, width: int) -> NDArray[np.int32]:
    """What kernels read of `width` rows, int32 [4 + NEAR, width].

    Positions, cells (-1: padding, not stored), sequences, rows of the tile that begins at a row
    (0: none does); then, as [width, NEAR], the near zone's cells in position order (-1: before the
    first token).
    """
    plan = np.zeros((4 + NEAR, width), np.int32)
    positions, cells, sequences, tile_rows = plan[:4]
    near = plan[4:].reshape(width, NEAR)
    count = rows.num_rows
    positions[:count] = rows.lengths - 1
    cells[:] = -1
    cells[:count] = cache.cells(rows.sequences, rows.slots)
    sequences[:count] = rows.sequences
    near_cells = cache.cells(rows.sequences[:, None], np.maximum(rows.near, 0))
    near[:count] = np.where(rows.near < 0, -1, near_cells)
    first, step = 0, _rows_per_tile(cache)
    for member in rows.members:
        starts: Int64Array = np.arange(0, len(member), step)
        tile_rows[first + starts] = np.minimum(step, len(member) - starts)
        first += len(member)
    return plan


def _rows_per_tile(cache: KvCache) -> int:
    return max(1, TILE // _power_of_two(cache.group_size))


def _power_of_two(number: int) -> int:
    """The smallest that is not below."""
    return 1 << (number - 1).bit_length()
