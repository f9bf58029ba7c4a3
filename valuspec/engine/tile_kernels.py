"""A matrix product in bf16 of which every element is one sum in one order.

    y[row, n] = bias[n] + sum over k of x[row, k] w[n, k]

The sum is kept in fp32 and grows by two products at a time, in the order of k, whatever the number
of rows: the instruction is VDPBF16PS (AVX512-BF16), sixteen sums at once. So a row's bits cannot
depend on other rows, and a forward of few rows takes the time that its weights take to come from
memory.

Weights lie as the loop reads them: in units of OUTPUTS outputs, of each pair after pair, of each
pair all outputs. A unit is small enough for a core's cache, where it stays while the rows pass by,
up to ROWS of them in registers. Threads take units as they become free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache as memoize
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from valuspec.jit import EntryPoint, entry_point

LANES = 16
#: Outputs of a unit: two vector registers of sums for each row.
OUTPUTS = 2 * LANES
#: Rows whose sums fit the registers, beside the weights of one pair.
ROWS = 12

binding.initialize_native_asmparser()


class Product(ctypes.Structure):
    """What the threads that compute one product are given together."""

    _fields_ = (
        ("taken", ctypes.c_int64),  # units that threads took
        ("x", ctypes.c_int64),  # -> [num_rows, num_pairs] pairs of bf16
        ("weight", ctypes.c_int64),  # -> [num_units, num_pairs, OUTPUTS] pairs, at a cache line
        ("bias", ctypes.c_int64),  # -> float32 [num_units, OUTPUTS]
        ("y", ctypes.c_int64),  # -> bf16 [num_rows, num_units, OUTPUTS]
        ("num_rows", ctypes.c_int64),
        ("num_pairs", ctypes.c_int64),
        ("num_units", ctypes.c_int64),
    )


@memoize
def supported() -> bool:
    """Whether this processor has the instruction, and nothing better for many rows (AMX)."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512bf16")) and not features.get("amx-bf16")


@memoize
def entry() -> EntryPoint:
    """`void multiply(Product *)`, for any number of threads at once."""
    of_product = types.void(types.CPointer(from_dtype(np.dtype(Product))))  # type: ignore[no-untyped-call]
    return entry_point(of_product, _multiply)


def _multiply(product: Any) -> None:
    p = carray(product, 1)[0]
    unit_bytes = 4 * OUTPUTS * p.num_pairs
    chunks = -(-p.num_rows // ROWS)
    counter = _address(product)
    unit = _take(counter)
    while unit < p.num_units:
        for chunk in range(chunks):  # as even as can be: a tile of one row takes as long as of four
            first = p.num_rows * chunk // chunks
            count = p.num_rows * (chunk + 1) // chunks - first
            _tile(
                count,
                p.x + 4 * p.num_pairs * first,
                p.weight + unit_bytes * unit,
                p.num_pairs,
                p.bias + 4 * OUTPUTS * unit,
                p.y + 2 * OUTPUTS * (p.num_units * first + unit),
                2 * OUTPUTS * p.num_units,
            )
        unit = _take(counter)


# -- what the compiler is told by hand ------------------------------------------------------------
# `_take` stands in the other files of kernels too: see `valuspec.jit`.


def _compile_address(_context: Any, pointer: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], cgutils.intp_t)

    return types.int64(pointer), generate


def _compile_take(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], cgutils.intp_t.as_pointer())
        return builder.atomic_rmw("add", counter, cgutils.intp_t(1), "monotonic")

    return types.int64(types.int64), generate


def _compile_tile(
    _context: Any, rows: Any, x: Any, weight: Any, num_pairs: Any, bias: Any, y: Any, y_stride: Any
) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        count, *rest = arguments
        done = builder.append_basic_block("done")
        choice = builder.switch(count, done)
        for number in range(1, ROWS + 1):
            block = builder.append_basic_block(f"rows{number}")
            choice.add_case(ir.Constant(count.type, number), block)
            builder.position_at_end(block)
            _write_tile(builder, number, *rest)
            builder.branch(done)
        builder.position_at_end(done)

    return types.void(*[types.int64] * 7), generate


def _write_tile(
    builder: Any, rows: int, x: Any, weight: Any, num_pairs: Any, bias: Any, y: Any, y_stride: Any
) -> None:
    """A loop over pairs, in which each row has two vectors of sums."""
    int64, lanes = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
    halves = range(OUTPUTS // LANES)
    # Row r of x lies at x + (an odd multiple of the stride) * 1, 2, 4 or 8: few registers.
    stride = builder.mul(num_pairs, int64(4))
    multiples = {odd: builder.mul(stride, int64(odd)) for odd in range(1, rows, 2)}

    def add_products(total: Any, weights: Any, pair: Any, row: int) -> Any:
        scale = row & -row
        place = f"($3,$4,{scale})" if row else "($3)"
        operands = [total, weights, pair, *([multiples[row // scale]] if row else [])]
        instruction = ir.InlineAsm(
            ir.FunctionType(lanes, [operand.type for operand in operands]),
            f"vdpbf16ps {place}{{1to16}}, $2, $0",
            "=v,0,v,r" + ",r" * bool(row),
        )
        return builder.call(instruction, operands)

    before, loop = builder.block, builder.append_basic_block("pairs")
    after = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(int64)
    sums = [[builder.phi(lanes) for _ in halves] for _ in range(rows)]
    pair = builder.add(x, builder.shl(k, int64(2)))
    weights = [_load(builder, weight, _offset(builder, k, half), lanes, 64) for half in halves]
    grown = [
        [add_products(total, w, pair, row) for total, w in zip(sums[row], weights, strict=True)]
        for row in range(rows)
    ]
    following = builder.add(k, int64(1))
    builder.cbranch(builder.icmp_signed("<", following, num_pairs), loop, after)
    for phi, first, later in [
        (k, int64(0), following),
        *(
            (phi, ir.Constant(lanes, [0.0] * LANES), later)
            for row in range(rows)
            for phi, later in zip(sums[row], grown[row], strict=True)
        ),
    ]:
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)

    builder.position_at_end(after)
    narrow = ir.InlineAsm(
        ir.FunctionType(ir.VectorType(ir.IntType(16), LANES), [lanes]),
        "vcvtneps2bf16 $1, $0",  # to nearest even
        "=v,v",
    )
    for half in halves:
        added = _load(builder, bias, int64(4 * LANES * half), lanes, 64)
        for row in range(rows):
            offset = builder.add(builder.mul(y_stride, int64(row)), int64(2 * LANES * half))
            value = builder.call(narrow, [builder.fadd(grown[row][half], added)])
            place = builder.inttoptr(builder.add(y, offset), value.type.as_pointer())
            builder.store(value, place, align=2)


def _offset(builder: Any, k: Any, half: int) -> Any:
    int64 = ir.IntType(64)
    return builder.add(builder.mul(k, int64(4 * OUTPUTS)), int64(4 * LANES * half))


def _load(builder: Any, address: Any, offset: Any, kind: Any, align: int) -> Any:
    place = builder.inttoptr(builder.add(address, offset), kind.as_pointer())
    return builder.load(place, align=align)


_address: Any = intrinsic(_compile_address)
#: Count one up at an address that other threads count at too, and return what was there.
_take: Any = intrinsic(_compile_take)
#: (rows, x, weight, pairs, bias, y, bytes between rows of y): one unit for up to ROWS rows.
_tile: Any = intrinsic(_compile_tile)
