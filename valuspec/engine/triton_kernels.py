"""The kernels of `triton_attention`: store rows, attend far, attend near and add up.

What a program computes is fixed by its row (or tile of rows) and kv head; sizes of blocks never
depend on how many rows there are or how long contexts are, and no program waits for another. All
sums are fp32:

    far    keys 0 .. p - near of the row at position p, `product` keys a time in position order;
           every `slice_keys` positions a fresh sum
    near   the last `near` keys of the row's own path, in position order
    out    near, then slice after slice in position order

A tile's rows share the loads of far keys and nothing else: a matrix product computes each of its
rows from that row and the other matrix alone. Keys that one row of a tile may see and another may
not have weight zero for the other, and zero times a finite value changes no sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first launch, once: not again for numbers that happen to divide by 16."""
    numbers = ["width", "table_width", "window"]
    return triton.jit(do_not_specialize=numbers)(function)


@kernel
def store_rows(
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    cells: tl.tensor,
    group: tl.constexpr,
    num_kv_heads: tl.constexpr,
    size: tl.constexpr,
    size_pad: tl.constexpr,
    block: tl.constexpr,
    ones: tl.constexpr,
) -> None:
    """Store the key and value of one row and kv head; a row without a cell is padding."""
    row, head = tl.program_id(0), tl.program_id(1)
    cell = tl.load(cells + row)
    if cell < 0:
        return
    d = tl.arange(0, size_pad)
    inside = d < size
    source = qkv + (row * (group + 2) * num_kv_heads + group * num_kv_heads + head) * size + d
    matrix = (cell // block).to(tl.int64) * num_kv_heads + head
    at = cell % block
    key = tl.load(source, mask=inside)
    tl.store(keys + (matrix * size + d) * block + at, key, mask=inside)
    target = values + (matrix * block + at) * (size + ones)
    tl.store(target + d, tl.load(source + num_kv_heads * size, mask=inside), mask=inside)
    tl.store(target + size + tl.arange(0, ones), tl.full((ones,), 1.0, tl.float32))


@kernel
def capped(score: tl.tensor, cap: tl.constexpr) -> Any:
    """cap * tanh(score / cap), of which Triton's language has no function."""
    small = tl.exp(-2 / cap * tl.abs(score))
    size = cap * (1 - small) / (1 + small)
    return tl.where(score < 0, -size, size)


@kernel
def far_zone(
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    sequences: tl.tensor,
    tile_rows: tl.tensor,
    tables: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    peaks: tl.tensor,
    width: tl.tensor,
    table_width: tl.tensor,
    window: tl.tensor,
    softcap: tl.constexpr,
    group: tl.constexpr,
    group_pad: tl.constexpr,
    num_kv_heads: tl.constexpr,
    size: tl.constexpr,
    size_pad: tl.constexpr,
    block: tl.constexpr,
    ones: tl.constexpr,
    near: tl.constexpr,
    rows_per_tile: tl.constexpr,
    slice_keys: tl.constexpr,
    product: tl.constexpr,
) -> None:
    """One slice of the far zone for a tile: up to `rows_per_tile` rows from `first` on.

    Leaves, for each row and head, the highest score, the sum of weights exp(score - highest), and
    the values' sum under these weights; nothing for a slice that no row of the tile reaches.
    """
    first, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(tile_rows + first)
    if num_rows == 0:  # inside another tile, or padding
        return
    m = tl.arange(0, rows_per_tile * group_pad)
    row, member = first + m // group_pad, m % group_pad
    present = (m // group_pad < num_rows) & (member < group)
    position = tl.load(positions + row, mask=present, other=-1)
    last = position - near
    begin = part * slice_keys
    stop = tl.minimum(tl.max(last, 0) + 1, begin + slice_keys)
    if begin >= stop:
        return
    d, n = tl.arange(0, size_pad), tl.arange(0, product)
    inside = d < size
    q_row = row * (group + 2) * num_kv_heads + head * group + member
    q_mask = present[:, None] & inside[None, :]
    q = tl.load(qkv + q_row[:, None] * size + d[None, :], mask=q_mask, other=0.0)
    table = tables + tl.load(sequences + first) * table_width

    peak = tl.full((rows_per_tile * group_pad,), -float("inf"), tl.float32)
    weight = tl.zeros((rows_per_tile * group_pad,), tl.float32)
    total = tl.zeros((rows_per_tile * group_pad, size_pad), tl.float32)
    for start in range(begin, stop, product):
        matrix = tl.load(table + start // block).to(tl.int64) * num_kv_heads + head
        at, key = start % block + n, start + n
        mine = key < stop  # what lies behind may be anybody's
        k_at = keys + (matrix * size + d[:, None]) * block + at[None, :]
        k = tl.load(k_at, mask=inside[:, None] & mine[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee")
        if softcap > 0:
            score = capped(score, softcap)
        hidden = (key[None, :] > last[:, None]) | (key[None, :] <= position[:, None] - window)
        score = tl.where(hidden, -float("inf"), score)
        highest = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)  # nothing seen so far
        kept = tl.exp(peak - base)
        v_at = values + (matrix * block + at[:, None]) * (size + ones) + d[None, :]
        v = tl.load(v_at, mask=mine[:, None] & inside[None, :], other=0.0)
        w = tl.exp(score - base[:, None]).to(v.dtype)
        weight = weight * kept + tl.sum(w.to(tl.float32), 1)
        total = tl.dot(w, v, total * kept[:, None], input_precision="ieee")
        peak = highest
    place = (part * width + row) * group * num_kv_heads + head * group + member
    tl.store(peaks + place, peak, mask=present)
    tl.store(weights + place, weight, mask=present)
    tl.store(sums + place[:, None] * size + d[None, :], total, mask=q_mask)


@kernel
def near_zone(
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    cells: tl.tensor,
    near_cells: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    peaks: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    window: tl.tensor,
    softcap: tl.constexpr,
    group: tl.constexpr,
    group_rows: tl.constexpr,
    num_kv_heads: tl.constexpr,
    size: tl.constexpr,
    size_pad: tl.constexpr,
    block: tl.constexpr,
    ones: tl.constexpr,
    near: tl.constexpr,
    slice_keys: tl.constexpr,
) -> None:
    """The near zone of one row, then the slices of its far zone; zeros for a row of padding."""
    row, head = tl.program_id(0), tl.program_id(1)
    m, d, n = tl.arange(0, group_rows), tl.arange(0, size_pad), tl.arange(0, near)
    inside = d < size
    mask = (m < group)[:, None] & inside[None, :]
    out_row = (row * num_kv_heads + head) * group + m
    out_at = out + out_row[:, None] * size + d[None, :]
    if tl.load(cells + row) < 0:
        tl.store(out_at, tl.zeros((group_rows, size_pad), tl.float32), mask=mask)
        return
    q_row = row * (group + 2) * num_kv_heads + head * group + m
    q = tl.load(qkv + q_row[:, None] * size + d[None, :], mask=mask, other=0.0)
    cell = tl.load(near_cells + row * near + n)  # -1: before the first token
    seen = (cell >= 0) & (n - near + 1 > -window)
    matrix = (cell // block).to(tl.int64) * num_kv_heads + head
    at = cell % block
    k_at = keys + (matrix[None, :] * size + d[:, None]) * block + at[None, :]
    k = tl.load(k_at, mask=inside[:, None] & seen[None, :], other=0.0)
    score = tl.dot(q, k, input_precision="ieee")
    if softcap > 0:
        score = capped(score, softcap)
    score = tl.where(seen[None, :], score, -float("inf"))
    peak = tl.max(score, 1)  # finite: a row sees itself
    v_at = values + (matrix * block + at)[:, None] * (size + ones) + d[None, :]
    v = tl.load(v_at, mask=seen[:, None] & inside[None, :], other=0.0)
    w = tl.exp(score - peak[:, None]).to(v.dtype)
    weight = tl.sum(w.to(tl.float32), 1)
    total = tl.dot(w, v, input_precision="ieee")

    num_slices = (tl.load(positions + row) - near + slice_keys) // slice_keys
    for part in range(num_slices):
        place = (part * width + row) * group * num_kv_heads + head * group + m
        far_peak = tl.load(peaks + place, mask=m < group, other=-float("inf"))
        highest = tl.maximum(peak, far_peak)
        kept, added = tl.exp(peak - highest), tl.exp(far_peak - highest)
        far_weight = tl.load(weights + place, mask=m < group, other=0.0)
        far_total = tl.load(sums + place[:, None] * size + d[None, :], mask=mask, other=0.0)
        weight = weight * kept + far_weight * added
        total = total * kept[:, None] + far_total * added[:, None]
        peak = highest
    tl.store(out_at, total / weight[:, None], mask=mask)
