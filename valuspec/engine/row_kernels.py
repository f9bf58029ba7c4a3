"""The compiled loops of `row_ops`, over bits of bf16: fp32 arithmetic, each result rounded once.

`Rows...` structures are what the threads that do one of these for all rows are given together; a
thread that is free takes the next row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache as memoize
from typing import Any

import numpy as np
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from valuspec.jit import EntryPoint, entry_point, kernel

LANES = 16
SOME = 256
"""Logits looked through at a time."""


class RowsNorm(ctypes.Structure):
    """x += residual; y = norm(x). Without a residual (0) x stays."""

    _fields_ = (
        ("taken", ctypes.c_int64),  # rows that threads took
        ("x", ctypes.c_int64),  # -> [num_rows, size]
        ("residual", ctypes.c_int64),  # -> [num_rows, size], or 0
        ("scale", ctypes.c_int64),  # -> float32 [size]
        ("y", ctypes.c_int64),  # -> [num_rows, size]
        ("num_rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("eps", ctypes.c_double),
    )


class RowsRotation(ctypes.Structure):
    """Norms of the query and key heads where there are scales; then rotation, in place."""

    _fields_ = (
        ("taken", ctypes.c_int64),  # rows that threads took
        ("heads", ctypes.c_int64),  # -> [num_rows, queries + 2 * keys, size]
        ("query_scale", ctypes.c_int64),  # -> float32 [size], or 0
        ("key_scale", ctypes.c_int64),  # -> float32 [size], or 0
        ("positions", ctypes.c_int64),  # -> int64 [num_rows]
        ("cos", ctypes.c_int64),  # -> float32 [num_positions, size]
        ("sin", ctypes.c_int64),  # -> float32 [num_positions, size], signed
        ("num_rows", ctypes.c_int64),
        ("num_positions", ctypes.c_int64),
        ("num_queries", ctypes.c_int64),
        ("num_keys", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("scaling", ctypes.c_double),
    )


class RowsGate(ctypes.Structure):
    """y = silu(gate) * up."""

    _fields_ = (
        ("taken", ctypes.c_int64),  # rows that threads took
        ("x", ctypes.c_int64),  # -> [num_rows, 2, size]: gate, up
        ("y", ctypes.c_int64),  # -> [num_rows, size]
        ("num_rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
    )


class RowsPick(ctypes.Structure):
    """y[row] = x[picked[row]]."""

    _fields_ = (
        ("taken", ctypes.c_int64),  # rows that threads took
        ("x", ctypes.c_int64),  # -> [num_choices, size]
        ("picked", ctypes.c_int64),  # -> int64 [num_rows]
        ("y", ctypes.c_int64),  # -> [num_rows, size]
        ("num_rows", ctypes.c_int64),
        ("num_choices", ctypes.c_int64),
        ("size", ctypes.c_int64),
    )


class RowsCopy(ctypes.Structure):
    """y[:, first : first + size] = x."""

    _fields_ = (
        ("taken", ctypes.c_int64),  # rows that threads took
        ("x", ctypes.c_int64),  # -> [num_rows, size]
        ("y", ctypes.c_int64),  # -> [num_rows, width]
        ("num_rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


class RowsTop(ctypes.Structure):
    """Ids and log probabilities of the likeliest in each row, likeliest first.

    Of equal ones the lowest id comes first. One that is not a number makes probabilities none.
    """

    _fields_ = (
        ("taken", ctypes.c_int64),  # rows that threads took
        ("logits", ctypes.c_int64),  # -> [num_rows, size]
        ("ids", ctypes.c_int64),  # -> int64 [num_rows, count]
        ("log_p", ctypes.c_int64),  # -> float32 [num_rows, count]
        ("num_rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


@memoize
def entry(kind: type[ctypes.Structure]) -> EntryPoint:
    """`void work(kind *)`, for any number of threads at once."""
    work = {
        RowsNorm: _norm_rows,
        RowsRotation: _rotate_rows,
        RowsGate: _gate_rows,
        RowsPick: _pick_rows,
        RowsCopy: _copy_rows,
        RowsTop: _top_of_rows,
    }[kind]
    pointer = types.CPointer(from_dtype(np.dtype(kind)))  # type: ignore[no-untyped-call]
    return entry_point(types.void(pointer), work)


def _norm_rows(call: Any) -> None:
    c = carray(call, 1)[0]
    x = carray(_pointer(c.x), (c.num_rows, c.size), np.int16)
    y = carray(_pointer(c.y), (c.num_rows, c.size), np.int16)
    scale = carray(_pointer(c.scale), (c.size,), np.float32)
    row = _take(call)
    while row < c.num_rows:
        if c.residual:
            residual = carray(_pointer(c.residual), (c.num_rows, c.size), np.int16)
            _add_row(x[row], residual[row])
        _norm_row(x[row], scale, np.float32(c.eps), y[row])
        row = _take(call)


def _rotate_rows(call: Any) -> None:
    c = carray(call, 1)[0]
    heads = carray(
        _pointer(c.heads), (c.num_rows, c.num_queries + 2 * c.num_keys, c.size), np.int16
    )
    positions = carray(_pointer(c.positions), (c.num_rows,), np.int64)
    cos = carray(_pointer(c.cos), (c.num_positions, c.size), np.float32)
    sin = carray(_pointer(c.sin), (c.num_positions, c.size), np.float32)
    row = _take(call)
    while row < c.num_rows:
        if c.query_scale:
            scale = carray(_pointer(c.query_scale), (c.size,), np.float32)
            for head in range(c.num_queries):
                _norm_row(heads[row, head], scale, np.float32(c.eps), heads[row, head])
        if c.key_scale:
            scale = carray(_pointer(c.key_scale), (c.size,), np.float32)
            for head in range(c.num_queries, c.num_queries + c.num_keys):
                _norm_row(heads[row, head], scale, np.float32(c.eps), heads[row, head])
        at = positions[row]
        _rotate_row(heads[row], c.num_queries, c.num_keys, cos[at], sin[at], np.float32(c.scaling))
        row = _take(call)


def _gate_rows(call: Any) -> None:
    c = carray(call, 1)[0]
    x = carray(_pointer(c.x), (c.num_rows, 2, c.size), np.int16)
    y = carray(_pointer(c.y), (c.num_rows, c.size), np.int16)
    row = _take(call)
    while row < c.num_rows:
        _gate_row(x[row, 0], x[row, 1], y[row])
        row = _take(call)


def _pick_rows(call: Any) -> None:
    c = carray(call, 1)[0]
    x = carray(_pointer(c.x), (c.num_choices, c.size), np.int16)
    picked = carray(_pointer(c.picked), (c.num_rows,), np.int64)
    y = carray(_pointer(c.y), (c.num_rows, c.size), np.int16)
    row = _take(call)
    while row < c.num_rows:
        y[row] = x[picked[row]]
        row = _take(call)


def _copy_rows(call: Any) -> None:
    c = carray(call, 1)[0]
    x = carray(_pointer(c.x), (c.num_rows, c.size), np.int16)
    y = carray(_pointer(c.y), (c.num_rows, c.width), np.int16)
    row = _take(call)
    while row < c.num_rows:
        for i in range(c.size):
            y[row, c.first + i] = x[row, i]
        row = _take(call)


def _top_of_rows(call: Any) -> None:
    c = carray(call, 1)[0]
    logits = carray(_pointer(c.logits), (c.num_rows, c.size), np.int16)
    ids = carray(_pointer(c.ids), (c.num_rows, c.count), np.int64)
    log_p = carray(_pointer(c.log_p), (c.num_rows, c.count), np.float32)
    values = np.empty(c.size, np.float32)
    row = _take(call)
    while row < c.num_rows:
        for i in range(c.size):
            values[i] = _widen(logits[row, i])
        _top_row(values, ids[row], log_p[row])
        row = _take(call)


# -- all rows on one thread -----------------------------------------------------------------------


@kernel
def norm(x: Any, scale: NDArray[np.float32], eps: Any, y: Any) -> None:
    """Of each head of x [num_rows, heads, size]."""
    for row in range(x.shape[0]):
        for head in range(x.shape[1]):
            _norm_row(x[row, head], scale, eps, y[row, head])


@kernel
def add_and_norm(x: Any, residual: Any, scale: NDArray[np.float32], eps: Any, y: Any) -> None:
    for row in range(x.shape[0]):
        _add_row(x[row], residual[row])
        _norm_row(x[row], scale, eps, y[row])


@kernel
def rotate(x: Any, num_queries: int, num_keys: int, cos: Any, sin: Any, scaling: Any) -> None:
    for row in range(x.shape[0]):
        _rotate_row(x[row], num_queries, num_keys, cos[row], sin[row], scaling)


@kernel
def gate(x: Any, y: Any) -> None:
    """x [num_rows, 2, size]: gate, up"""
    for row in range(x.shape[0]):
        _gate_row(x[row, 0], x[row, 1], y[row])


# -- one row --------------------------------------------------------------------------------------
# `_widen`, `_narrow`, `_pointer` and `_take` stand in `path_kernels` too: kernels call only those
# of their own file.


@kernel
def _add_row(x: Any, residual: Any) -> None:
    for i in range(x.size):
        x[i] = _narrow(_widen(x[i]) + _widen(residual[i]))


@kernel
def _norm_row(x: Any, scale: NDArray[np.float32], eps: Any, y: Any) -> None:
    total = _sum_of_squares(x)
    factor = np.float32(1) / np.sqrt(total / np.float32(x.size) + eps)
    for i in range(x.size):
        y[i] = _narrow(_widen(x[i]) * factor * scale[i])


@kernel
def _sum_of_squares(x: Any) -> Any:
    """In sixteen lanes, each in order, and then the lanes; four vectors at a time."""
    lanes = np.zeros(LANES, np.float32)
    whole = x.size // (4 * LANES)
    for step in range(whole):
        some = x[4 * LANES * step : 4 * LANES * (step + 1)]
        for i in range(LANES):
            a, b = _widen(some[i]), _widen(some[i + LANES])
            c, d = _widen(some[i + 2 * LANES]), _widen(some[i + 3 * LANES])
            lanes[i] = lanes[i] + a * a + b * b + c * c + d * d
    total = np.float32(0)
    for lane in range(LANES):
        total += lanes[lane]
    for i in range(4 * LANES * whole, x.size):
        total += _widen(x[i]) * _widen(x[i])
    return total


@kernel
def _rotate_row(x: Any, num_queries: int, num_keys: int, cos: Any, sin: Any, scaling: Any) -> None:
    for head in range(num_queries):
        _rotate_head(x[head], cos, sin, scaling)
    for head in range(num_queries, num_queries + num_keys):
        _rotate_head(x[head], cos, sin, np.float32(1))


@kernel
def _rotate_head(x: Any, cos: Any, sin: Any, factor: Any) -> None:
    half = x.size // 2
    low, high = x[:half], x[half:]
    for i in range(half):
        a, b = _widen(low[i]), _widen(high[i])
        low[i] = _narrow((a * cos[i] + b * sin[i]) * factor)
        high[i] = _narrow((b * cos[half + i] + a * sin[half + i]) * factor)


@kernel
def _gate_row(gate: Any, up: Any, y: Any) -> None:
    """Rounded after the activation and after the product, as two operations would be."""
    for i in range(y.size):
        x = _widen(gate[i])
        active = _narrow(x / (np.float32(1) + _exp(-x)))
        y[i] = _narrow(_widen(active) * _widen(up[i]))


@kernel
def _top_row(values: Any, ids: Any, log_p: Any) -> None:
    """The greatest so far are a sorted list; few pieces of a row have anything for it."""
    count = ids.size
    ids[:], log_p[:] = 0, -np.inf
    for first in range(0, values.size, SOME):
        some = values[first : first + SOME]
        if not _any_above(some, log_p[count - 1]):
            continue
        for index in range(some.size):
            if some[index] > log_p[count - 1]:
                at = count - 1
                while at > 0 and some[index] > log_p[at - 1]:
                    ids[at], log_p[at] = ids[at - 1], log_p[at - 1]
                    at -= 1
                ids[at], log_p[at] = first + index, some[index]
    log_p -= log_p[0] + np.log(_sum_of_exponentials(values, log_p[0]))


@kernel
def _any_above(x: Any, limit: Any) -> Any:
    above = np.int32(0)
    for i in range(x.size):
        above |= np.int32(x[i] > limit)
    return above != 0


@kernel
def _sum_of_exponentials(x: Any, greatest: Any) -> Any:
    """In sixteen lanes, each in order, and then the lanes."""
    lanes = np.zeros(LANES, np.float32)
    whole = x.size // LANES
    for step in range(whole):
        some = x[LANES * step : LANES * (step + 1)]
        for i in range(LANES):
            lanes[i] += _exp(some[i] - greatest)
    total = np.float32(0)
    for lane in range(LANES):
        total += lanes[lane]
    for i in range(LANES * whole, x.size):
        total += _exp(x[i] - greatest)
    return total


@kernel
def _exp(x: Any) -> Any:
    """e^x in fp32; Cephes' expf polynomial."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    f = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * f * f + f + np.float32(1.0)) * power


@kernel
def _widen(bits: Any) -> Any:
    return np.int32(np.int32(bits) << np.int32(16)).view(np.float32)


@kernel
def _narrow(value: Any) -> Any:
    """To nearest even."""
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.int16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def _compile_pointer(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _compile_take(_context: Any, call: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        int64 = cgutils.intp_t
        counter = builder.bitcast(arguments[0], int64.as_pointer())
        return builder.atomic_rmw("add", counter, int64(1), "monotonic")

    return types.int64(call), generate


#: An address as a pointer.
_pointer: Any = intrinsic(_compile_pointer)
#: Count one up in the first field of a call, which other threads count up too; what was there.
_take: Any = intrinsic(_compile_take)
