"""A matrix product in bf16 of which every element is one sum in one order.

    y[row, n] = bias[n] + sum over k of x[row, k] w[n, k]

The sum is kept in fp32 and grows in the order of k, whatever the number of rows: by two products at
a time where the processor has an instruction for that, VDPBF16PS (AVX512-BF16), else by one, fused
(AVX2). So a row's bits cannot depend on other rows, and a forward of few rows takes the time that
its weights take to come from memory.

Weights lie as the loop reads them: in units of OUTPUTS outputs, of each pair after pair, of each
pair all outputs. A unit is small enough for a core's cache, where it stays while the rows pass by,
up to ROWS of them in registers. Threads take units as they become free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache as memoize
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from valuspec.jit import EntryPoint, entry_point, features, kernel

#: Whether products are added two at a time.
IN_TWOS = "avx512bf16" in features()
LANES = 16 if IN_TWOS else 8
#: Outputs of a unit: two vector registers of sums for each row.
OUTPUTS = 2 * LANES
#: Rows whose sums fit the registers (32, or 16 of AVX2), beside the weights of one pair.
ROWS = 12 if IN_TWOS else 6
#: Rows of x that are widened to fp32 at a time where they have to be: these fit a core's cache.
WIDENED = 48
#: Of a pair of x as a tile reads it, in bf16 or fp32.
PAIR_BYTES = 4 if IN_TWOS else 8

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
    """Whether tiles are the fastest that this processor has for bf16.

    Otherwise oneDNN is: where it has an instruction for many rows (AMX), and where it knows bf16
    (from AVX512 on) and we have no instruction for it.
    """
    if IN_TWOS:
        return "amx-bf16" not in features()
    return {"avx2", "fma"} <= features() and "avx512f" not in features()


@memoize
def entry() -> EntryPoint:
    """`void multiply(Product *)`, for any number of threads at once."""
    of_product = types.void(types.CPointer(from_dtype(np.dtype(Product))))  # type: ignore[no-untyped-call]
    return entry_point(of_product, _multiply)


def _multiply(product: Any) -> None:
    """Piece by piece, a unit's outputs for all rows; where x is widened, for WIDENED of them.

    There it is known one ahead which piece a thread takes next, whose weights are asked for, as
    evenly as the work goes on: all at once they would have to wait for one another.
    """
    p = carray(product, 1)[0]
    x = carray(_pointer(p.x), (p.num_rows, 2 * p.num_pairs), np.int16)
    blocks = 1 if IN_TWOS else -(-p.num_rows // WIDENED)
    widened = np.empty((0 if IN_TWOS else min(WIDENED, p.num_rows), x.shape[1]), np.float32)
    widened_block = -1
    unit_bytes = 4 * OUTPUTS * p.num_pairs
    counter = _address(product)
    piece = _take(counter)
    following = piece if IN_TWOS else _take(counter)
    while piece < blocks * p.num_units:
        block, unit = piece // p.num_units, piece % p.num_units
        first, last = p.num_rows * block // blocks, p.num_rows * (block + 1) // blocks
        if IN_TWOS:
            rows = p.x
        else:
            if block != widened_block:
                _widen_rows(x[first:last], widened)
                widened_block = block
            rows = widened.ctypes.data
        chunks = -(-(last - first) // ROWS)
        for chunk in range(chunks):  # as even as can be: a tile of one row takes as long as of four
            low = (last - first) * chunk // chunks
            high = (last - first) * (chunk + 1) // chunks
            _tile(
                high - low,
                rows + PAIR_BYTES * p.num_pairs * low,
                p.weight + unit_bytes * unit,
                p.num_pairs,
                p.bias + 4 * OUTPUTS * unit,
                p.y + 2 * OUTPUTS * (p.num_units * (first + low) + unit),
                2 * OUTPUTS * p.num_units,
                p.weight + unit_bytes * (following % p.num_units) + unit_bytes * chunk // chunks,
                -(-4 * OUTPUTS // chunks),
            )
        taken = _take(counter)
        piece, following = (taken, taken) if IN_TWOS else (following, taken)


@kernel
def _widen_rows(x: Any, y: Any) -> None:
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            y[row, k] = np.int32(np.int32(x[row, k]) << np.int32(16)).view(np.float32)


# -- what the compiler is told by hand ------------------------------------------------------------
# `_take` and `_pointer` stand in the other files of kernels too: see `valuspec.jit`.


def _compile_address(_context: Any, pointer: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], cgutils.intp_t)

    return types.int64(pointer), generate


def _compile_take(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], cgutils.intp_t.as_pointer())
        return builder.atomic_rmw("add", counter, cgutils.intp_t(1), "monotonic")

    return types.int64(types.int64), generate


def _compile_pointer(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _compile_tile(
    _context: Any, rows: Any, x: Any, weight: Any, num_pairs: Any, bias: Any,
    y: Any, y_stride: Any, ahead: Any, ahead_step: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
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

    return types.void(*[types.int64] * 9), generate


def _write_tile(
    builder: Any, rows: int, x: Any, weight: Any, num_pairs: Any, bias: Any,
    y: Any, y_stride: Any, ahead: Any, ahead_step: Any,
) -> None:  # fmt: skip
    """A loop over pairs, in which each row has two vectors of sums."""
    int64, lanes = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
    halves = range(OUTPUTS // LANES)
    # Row r of x lies at x + (an odd multiple of the stride) * 1, 2, 4 or 8: few registers.
    stride = builder.mul(num_pairs, int64(PAIR_BYTES))
    multiples = {odd: builder.mul(stride, int64(odd)) for odd in range(1, rows, 2)}
    add_pair = _add_in_twos if IN_TWOS else _add_one_by_one

    before, loop = builder.block, builder.append_basic_block("pairs")
    after = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(int64)
    sums = [[builder.phi(lanes) for _ in halves] for _ in range(rows)]
    pair = builder.add(x, builder.mul(k, int64(PAIR_BYTES)))
    weights = [builder.add(weight, _offset(builder, k, half)) for half in halves]
    scales = [row & -row for row in range(rows)]
    places = [
        _Place(pair, multiples[row // scale], scale) if row else _Place(pair)
        for row, scale in enumerate(scales)
    ]
    if not IN_TWOS:  # with twos it is not known yet whether this gains anything
        _ask_for(builder, builder.add(ahead, builder.mul(k, ahead_step)))
    grown = add_pair(builder, sums, weights, places)
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
    for half in halves:
        added = _load(builder, bias, int64(4 * LANES * half), lanes, 4 * LANES)
        for row in range(rows):
            offset = builder.add(builder.mul(y_stride, int64(row)), int64(2 * LANES * half))
            value = _narrow(builder, builder.fadd(grown[row][half], added))
            place = builder.inttoptr(builder.add(y, offset), value.type.as_pointer())
            builder.store(value, place, align=2)


class _Place(NamedTuple):
    """An address: base + multiple * scale."""

    base: Any
    multiple: Any = None
    scale: int = 1

    @property
    def operands(self) -> list[Any]:
        return [self.base] if self.multiple is None else [self.base, self.multiple]

    def written(self, first: int) -> str:
        """In an instruction whose operand number `first` is the base; the multiple comes next."""
        if self.multiple is None:
            return f"(${first})"
        return f"(${first},${first + 1},{self.scale})"


def _add_in_twos(builder: Any, sums: Any, weights: Any, places: list[_Place]) -> list[list[Any]]:
    """weights: where the pairs of a vector lie, as in `_add_one_by_one`"""
    kind = sums[0][0].type
    pairs = [_load(builder, weight, ir.IntType(64)(0), kind, 4 * LANES) for weight in weights]

    def add(total: Any, pair: Any, place: _Place) -> Any:
        operands = [total, pair, *place.operands]
        instruction = ir.InlineAsm(
            ir.FunctionType(total.type, [operand.type for operand in operands]),
            f"vdpbf16ps {place.written(3)}{{1to16}}, $2, $0",
            "=v,0,v" + ",r" * len(place.operands),
        )
        return builder.call(instruction, operands)

    return [
        [add(total, pair, place) for total, pair in zip(row, pairs, strict=True)]
        for row, place in zip(sums, places, strict=True)
    ]


def _add_one_by_one(builder: Any, sums: Any, weights: Any, places: list[_Place]) -> list[list[Any]]:
    """Weights are widened to fp32 in a register: the first of a pair is its lower half.

    The second ones are read once more: kept so long, they would take registers that sums need.
    """
    pairs, lanes = ir.VectorType(ir.IntType(32), LANES), sums[0][0].type
    of_three = ir.FunctionType(lanes, [lanes] * 3)
    find: Any = cgutils.get_or_insert_function
    fma = find(builder.module, of_three, f"llvm.fma.v{LANES}f32")

    def broadcast(place: _Place, offset: int) -> Any:
        operands = place.operands
        # By hand, else the compiler runs out of registers. It is told that memory is read: x was
        # widened just before.
        instruction = ir.InlineAsm(
            ir.FunctionType(lanes, [operand.type for operand in operands]),
            f"vbroadcastss {offset}{place.written(1)}, $0",
            "=x" + ",r" * len(operands) + ",~{memory}",
        )
        return builder.call(instruction, operands)

    def first(weight: Any) -> Any:
        pair = _load(builder, weight, ir.IntType(64)(0), pairs, 4 * LANES)
        return builder.bitcast(builder.shl(pair, ir.Constant(pairs, [16] * LANES)), lanes)

    def second(weight: Any) -> Any:
        operands = [weight, ir.Constant(lanes, [0.0] * LANES)]
        instruction = ir.InlineAsm(  # zero, but for the upper half of each pair
            ir.FunctionType(lanes, [operand.type for operand in operands]),
            "vpblendw $$170, ($1), $2, $0",
            "=x,r,x,~{memory}",
        )
        return builder.call(instruction, operands)

    for offset, of_pair in ((0, first), (4, second)):
        factors = [of_pair(weight) for weight in weights]
        grown = []
        for row, place in zip(sums, places, strict=True):
            number = broadcast(place, offset)
            grown.append(
                [
                    builder.call(fma, [number, factor, total])
                    for total, factor in zip(row, factors, strict=True)
                ]
            )
        sums = grown
    return grown


def _ask_for(builder: Any, address: Any) -> None:
    """Have a cache line come to this core's larger cache."""
    kind = ir.FunctionType(ir.VoidType(), [address.type])
    builder.call(ir.InlineAsm(kind, "prefetcht1 ($0)", "r", side_effect=True), [address])


def _narrow(builder: Any, value: Any) -> Any:
    """A vector of fp32 as the bits of bf16, to nearest even."""
    short = ir.VectorType(ir.IntType(16), LANES)
    if IN_TWOS:
        instruction = ir.InlineAsm(
            ir.FunctionType(short, [value.type]), "vcvtneps2bf16 $1, $0", "=v,v"
        )
        return builder.call(instruction, [value])
    kind = ir.VectorType(ir.IntType(32), LANES)
    bits = builder.bitcast(value, kind)

    def all_lanes(number: int) -> Any:
        return ir.Constant(kind, [number] * LANES)

    odd = builder.and_(builder.lshr(bits, all_lanes(16)), all_lanes(1))
    rounded = builder.add(builder.add(bits, all_lanes(0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, all_lanes(16)), short)


def _offset(builder: Any, k: Any, half: int) -> Any:
    int64 = ir.IntType(64)
    return builder.add(builder.mul(k, int64(4 * OUTPUTS)), int64(4 * LANES * half))


def _load(builder: Any, address: Any, offset: Any, kind: Any, align: int) -> Any:
    place = builder.inttoptr(builder.add(address, offset), kind.as_pointer())
    return builder.load(place, align=align)


_address: Any = intrinsic(_compile_address)
#: An address as a pointer.
_pointer: Any = intrinsic(_compile_pointer)
#: Count one up at an address that other threads count at too, and return what was there.
_take: Any = intrinsic(_compile_take)
#: (rows, x, weight, pairs, bias, y, bytes between rows of y, weight of the next, bytes of it to ask
#: for with each pair): one unit for up to ROWS rows.
_tile: Any = intrinsic(_compile_tile)
