"""The compiled loops of `path_attention`, which says what they compute and why it is exact.

One file, though a long one: a kernel may call only kernels of its own file (see `valuspec.jit`).
From the top: what a call is given, numbers, the work of a thread, the walk over a row's keys, the
products. The order of additions in `_soften` and in the products is the promise; everything else
may be rearranged.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache as memoize
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from valuspec.jit import EntryPoint, entry_point, features, kernel

#: Queries that share a block turned into fp32; a row has one for each query head of a key head.
QUERIES = 24
#: Lanes of the sum of weights: a promise, whatever the width of a register.
LANES = 16
#: Columns of a tile of sums; the compiler takes as many registers as they need.
COLUMNS = 16
#: Rows of a tile: with two registers each what 16 registers of AVX2 hold, or with one each 32.
TILE = 12 if "avx512f" in features() else 6

FloatArray = NDArray[np.float32]
Int64Array = NDArray[np.int64]


class Call(ctypes.Structure):
    """What the threads that compute the attention of one layer are given together.

    Addresses, and the shapes of what is there; NumPy shapes, C order. Work is divided into units,
    the queries of one key head in one group of rows; a thread that is free takes the next.
    """

    _fields_ = (
        ("taken", ctypes.c_int64),  # -> int64 [3], zeros: threads that came, units and rows taken
        ("qkv", ctypes.c_int64),  # -> [rows, heads + 2 * kv heads, head size], queries first
        ("out", ctypes.c_int64),  # -> [rows, heads, head size]
        ("keys", ctypes.c_int64),  # -> [blocks, kv heads, head size, block size], of the layer
        ("values", ctypes.c_int64),  # -> [blocks, kv heads, block size, value size]
        ("tables", ctypes.c_int64),  # -> int64 [sequences, blocks of each], of the cache
        ("paths", ctypes.c_int64),  # -> int64 [4, rows], see `Paths`
        ("near", ctypes.c_int64),  # -> int64 [rows, slots near by]
        ("cells", ctypes.c_int64),  # -> int64 [rows]: where a row's key and value go
        ("groups", ctypes.c_int64),  # -> int64 [groups, 2]: first and last row + 1
        ("scratch", ctypes.c_int64),  # -> float32 [threads, floats of each], see `Scratch`
        ("num_rows", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),  # at least the head size; what is beyond is not read
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_sequences", ctypes.c_int64),
        ("blocks_each", ctypes.c_int64),
        ("num_near", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("longest", ctypes.c_int64),
        ("floats_each", ctypes.c_int64),
        ("softcap", ctypes.c_double),  # 0: none
    )


class Paths(NamedTuple):
    """The keys of each row, int64 [num_rows]: `lowest` to `lengths - 1`.

    Key j of a row is slot j below `starts`; above, it is an entry of `near` [num_rows, NEAR],
    whose last is the row itself. tables: the cache's.
    """

    tables: Int64Array
    sequences: Int64Array
    starts: Int64Array
    lowest: Int64Array
    lengths: Int64Array
    near: Int64Array


class Scratch(NamedTuple):
    """Working memory of one thread, float32."""

    queries: FloatArray
    """[queries, head size]"""
    keys: FloatArray
    """[head size, BLOCK]: keys of a block"""
    values: FloatArray
    """[BLOCK, head size in whole columns]: values of a block; nothing of note beyond"""
    scores: FloatArray
    """[queries, at least all keys]: scores, then weights, by position"""
    sums: FloatArray
    """[queries, head size in whole columns]: weighted values; nothing of note beyond"""
    lanes: FloatArray
    """[LANES]"""


@kernel
def plan(
    paths: Int64Array, slots: Int64Array, counts: Int64Array, tables: Int64Array,
    block_size: int, most: int, cells: Int64Array, groups: Int64Array,
) -> tuple[int, int, int]:  # fmt: skip
    """Fill `cells` and `groups` as in `Call`; (groups, longest path, keys of all rows).

    paths: as in `Call`; slots: where the rows' keys and values go
    counts: rows of each sequence; most: rows that share a block turned into fp32
    Returns (-1, row, 0) for a row that has no place in the tables.
    """
    first, num_groups = 0, 0
    for count in counts:
        for low in range(first, first + count, most):
            groups[num_groups, 0], groups[num_groups, 1] = low, min(low + most, first + count)
            num_groups += 1
        first += count
    sequences, lengths = paths[0], paths[3]
    longest, num_keys = 0, 0
    for row in range(slots.size):
        if not (
            0 <= sequences[row] < tables.shape[0] and 0 <= slots[row] < block_size * tables.shape[1]
        ):
            return -1, row, 0
        block = tables[sequences[row], slots[row] // block_size]
        cells[row] = block * block_size + slots[row] % block_size
        longest = max(longest, lengths[row])
        num_keys += lengths[row]
    return num_groups, longest, num_keys


# -- numbers --------------------------------------------------------------------------------------


def _widen(bits: Any) -> Any:
    """A stored number as fp32: itself, or the bits of a bf16."""
    raise NotImplementedError


@overload(_widen)
def _compile_widen(bits: Any) -> Any:
    if isinstance(bits, types.Float):

        def widen(bits: Any) -> Any:
            return bits

    else:

        def widen(bits: Any) -> Any:
            return np.int32(np.int32(bits) << np.int32(16)).view(np.float32)

    return widen


def _narrow(like: Any, value: Any) -> Any:
    """An fp32 number in the form of `like`; bf16 rounds to nearest even."""
    raise NotImplementedError


@overload(_narrow)
def _compile_narrow(like: Any, value: Any) -> Any:
    if isinstance(like, types.Float):

        def narrow(like: Any, value: Any) -> Any:
            return value

    else:

        def narrow(like: Any, value: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.int16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return narrow


def _compile_fma(_context: Any, a: Any, b: Any, c: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


#: a * b + c in fp32, rounded once: here the compiler has no choice whether to fuse.
_fma: Any = intrinsic(_compile_fma)


@kernel
def _exp(x: Any) -> Any:
    """e^x in fp32 for x <= 0; Cephes' expf polynomial (error below 2 ulp)."""
    x = max(x, np.float32(-87.0))
    n = np.floor(_fma(x, np.float32(1.44269504), np.float32(0.5)))
    f = _fma(n, np.float32(2.12194440e-4), _fma(n, np.float32(-0.693359375), x))
    p = np.float32(1.9875691500e-4)
    p = _fma(p, f, np.float32(1.3981999507e-3))
    p = _fma(p, f, np.float32(8.3334519073e-3))
    p = _fma(p, f, np.float32(4.1665795894e-2))
    p = _fma(p, f, np.float32(1.6666665459e-1))
    p = _fma(p, f, np.float32(5.0000001201e-1))
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return _fma(p, f * f, f + np.float32(1.0)) * power


# -- the work of a thread -------------------------------------------------------------------------


@memoize
def entry(stored: type[np.int16] | type[np.float32]) -> EntryPoint:
    """`void attend(Call *)`, for as many threads at once as there is scratch for.

    stored: what numbers the cache holds, fp32 or the bits of bf16
    """
    return entry_point(_of_call(), _attend_bf16 if stored is np.int16 else _attend_fp32)


@memoize
def store_entry() -> EntryPoint:
    """`void store(Call *)` for bits of bf16, to be done before any thread attends."""
    return entry_point(_of_call(), _store_bf16)


def _of_call() -> Any:
    return types.void(types.CPointer(from_dtype(np.dtype(Call))))  # type: ignore[no-untyped-call]


def _store_bf16(call: Any) -> None:
    _store(carray(call, 1)[0])


@kernel
def _store(c: Any) -> None:
    """This thread's share of the rows."""
    heads, size = c.num_kv_heads, c.head_size
    qkv = carray(_pointer(c.qkv), (c.num_rows, c.num_heads + 2 * heads, size), np.int16)
    keys = carray(_pointer(c.keys), (c.num_blocks, heads, size, c.block_size), np.int16)
    values = carray(_pointer(c.values), (c.num_blocks, heads, c.block_size, c.value_size), np.int16)
    cells = carray(_pointer(c.cells), (c.num_rows,), np.int64)
    row = _take(c.taken + 16)
    while row < c.num_rows:
        store(qkv[row : row + 1], keys, values, cells[row : row + 1])
        row = _take(c.taken + 16)


def _attend_bf16(call: Any) -> None:
    _attend(carray(call, 1)[0], np.int16)


def _attend_fp32(call: Any) -> None:
    _attend(carray(call, 1)[0], np.float32)


@kernel
def _attend(call: Any, stored: Any) -> None:
    """out[row] = attention of qkv[row]: this thread's share of the units."""
    heads, kv_heads, size = call.num_heads, call.num_kv_heads, call.head_size
    block_size = call.block_size
    in_rows, out_rows = (call.num_rows, heads + 2 * kv_heads, size), (call.num_rows, heads, size)
    key_blocks = (call.num_blocks, kv_heads, size, block_size)
    value_blocks = (call.num_blocks, kv_heads, block_size, call.value_size)
    qkv = carray(_pointer(call.qkv), in_rows, stored)
    out = carray(_pointer(call.out), out_rows, stored)
    keys = carray(_pointer(call.keys), key_blocks, stored)
    values = carray(_pointer(call.values), value_blocks, stored)
    groups = carray(_pointer(call.groups), (call.num_groups, 2), np.int64)
    by_row = carray(_pointer(call.paths), (4, call.num_rows), np.int64)
    paths = Paths(
        carray(_pointer(call.tables), (call.num_sequences, call.blocks_each), np.int64),
        by_row[0],
        by_row[1],
        by_row[2],
        by_row[3],
        carray(_pointer(call.near), (call.num_rows, call.num_near), np.int64),
    )
    here = call.scratch + 4 * call.floats_each * _take(call.taken)
    floats = carray(_pointer(here), (call.floats_each,), np.float32)
    scratch = _lay_out(floats, max(QUERIES, heads // kv_heads), size, block_size, call.longest)

    unit = _take(call.taken + 8)
    while unit < call.num_groups * kv_heads:
        group, head = unit // kv_heads, unit % kv_heads
        low, high = groups[group, 0], groups[group, 1]
        _attend_together(qkv, keys, values, head, paths, call.softcap, out, scratch, low, high)
        unit = _take(call.taken + 8)


@kernel
def _lay_out(floats: Any, queries: int, size: int, block_size: int, longest: int) -> Any:
    """One piece of memory as `Scratch`, whose parts begin at whole vectors."""
    padded, scores = -(-size // COLUMNS) * COLUMNS, _whole_vectors(longest)
    a = queries * size
    b = a + size * block_size
    c = b + block_size * padded
    d = c + queries * scores
    e = d + queries * padded
    return Scratch(
        floats[:a].reshape(queries, size),
        floats[a:b].reshape(size, block_size),
        floats[b:c].reshape(block_size, padded),
        floats[c:d].reshape(queries, scores),
        floats[d:e].reshape(queries, padded),
        floats[e : e + LANES],
    )


@kernel
def floats_of_scratch(queries: int, size: int, block_size: int, longest: int) -> int:
    """Floats that `_lay_out` needs, in whole vectors."""
    padded = -(-size // COLUMNS) * COLUMNS
    rows = queries * (size + _whole_vectors(longest) + padded)
    return _whole_vectors(rows + block_size * (padded + size) + LANES)


@kernel
def _whole_vectors(count: int) -> int:
    """At least `count` floats and a vector beyond them."""
    return (count // LANES + 2) * LANES


def _compile_pointer(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _compile_take(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        int64 = cgutils.intp_t
        counter = builder.inttoptr(arguments[0], int64.as_pointer())
        return builder.atomic_rmw("add", counter, int64(1), "monotonic")

    return types.int64(types.int64), generate


#: An address as a pointer.
_pointer: Any = intrinsic(_compile_pointer)
#: Count one up at an address that other threads count at too, and return what was there.
_take: Any = intrinsic(_compile_take)


# -- the walk -------------------------------------------------------------------------------------


@kernel
def store(qkv: Any, keys: Any, values: Any, cells: Any) -> None:
    """Write the rows' keys and values to their cells; layouts as in KvCache and `attend`."""
    heads, size, block_size = keys.shape[1], keys.shape[2], keys.shape[3]
    for row in range(cells.size):
        block, within = cells[row] // block_size, cells[row] % block_size
        for head in range(heads):
            key, value = qkv[row, head - 2 * heads], qkv[row, head - heads]
            for d in range(size):
                keys[block, head, d, within] = key[d]
                values[block, head, within, d] = value[d]


@kernel
def _attend_together(
    qkv: Any,
    keys: Any,
    values: Any,
    head: int,
    paths: Paths,
    softcap: float,
    out: Any,
    scratch: Scratch,
    low: int,
    high: int,
) -> None:
    """Rows low to high - 1, all of one sequence, and the queries of one key head.

    Up to the lowest of their starts the rows share the keys; beyond it each has its own.
    """
    group, size, block_size = out.shape[1] // keys.shape[1], out.shape[2], keys.shape[3]
    table = paths.tables[paths.sequences[low]]
    shared = paths.starts[low:high].min()
    lowest, all_from = paths.lowest[low:high].min(), paths.lowest[low:high].max()

    for row in range(low, high):
        for g in range(group):
            query, widened = qkv[row, head * group + g], scratch.queries[(row - low) * group + g]
            for d in range(size):
                widened[d] = _widen(query[d])
    for at in range(lowest - lowest % block_size, shared, block_size):
        _load_keys(scratch.keys, keys[table[at // block_size], head])
        _score(scratch, 0, (high - low) * group, at, min(block_size, shared - at))
    for row in range(low, high):
        at, length = max(shared, paths.lowest[row]), paths.lengths[row]
        for j in range(at, length):
            slot = _slot(paths, row, j)
            block = keys[table[slot // block_size], head]
            for d in range(size):
                scratch.keys[d, j - at] = _widen(block[d, slot % block_size])
        _score(scratch, (row - low) * group, (row - low + 1) * group, at, length - at)

    for row in range(low, high):
        for i in range((row - low) * group, (row - low + 1) * group):
            score = scratch.scores[i]
            if softcap > 0:
                for j in range(paths.lowest[row], paths.lengths[row]):
                    score[j] = np.float32(softcap * math.tanh(score[j] / softcap))
            _soften(score, paths.lowest[row], paths.lengths[row], scratch.lanes)

    scratch.sums[: (high - low) * group] = np.float32(0)
    for at in range(lowest - lowest % block_size, shared, block_size):
        count = min(block_size, shared - at)
        _load_values(scratch.values, values[table[at // block_size], head][:count], 0, size)
        if at >= all_from:
            _weigh(scratch, 0, (high - low) * group, at, 0, count)
        else:
            for row in range(low, high):
                skip = min(count, max(0, paths.lowest[row] - at))
                _weigh(scratch, (row - low) * group, (row - low + 1) * group, at, skip, count)
    for row in range(low, high):
        at, length = max(shared, paths.lowest[row]), paths.lengths[row]
        for j in range(at, length):
            slot = _slot(paths, row, j)
            block = values[table[slot // block_size], head]
            here = slot % block_size
            _load_values(scratch.values, block[here : here + 1], j - at, size)
        _weigh(scratch, (row - low) * group, (row - low + 1) * group, at, 0, length - at)
        for g in range(group):
            result, summed = out[row, head * group + g], scratch.sums[(row - low) * group + g]
            for d in range(size):
                result[d] = _narrow(result[d], summed[d])


@kernel
def _slot(paths: Paths, row: int, j: int) -> int:
    """Where key j of a row lies."""
    if j < paths.starts[row]:
        return j
    return int(paths.near[row, paths.near.shape[1] - (paths.lengths[row] - j)])


@kernel
def _load_keys(tile: Any, keys: Any) -> None:
    for d in range(keys.shape[0]):
        for j in range(keys.shape[1]):
            tile[d, j] = _widen(keys[d, j])


@kernel
def _load_values(tile: Any, values: Any, first: int, size: int) -> None:
    for j in range(values.shape[0]):
        for d in range(size):
            tile[first + j, d] = _widen(values[j, d])


@kernel
def _soften(score: Any, lowest: int, length: int, lanes: Any) -> None:
    """Turn scores into weights: exp(score - max), divided by the sum.

    Lanes go by position, and positions outside have weight zero, which leaves a sum as it is: so
    the order of additions is the row's own.
    """
    first, last = lowest - lowest % LANES, -(-length // LANES) * LANES
    score[first:lowest] = score[lowest]
    score[length:last] = score[lowest]
    # From here on counted from 0: only then does the compiler know no index negative.
    weight = score[first:last]
    peak = _greatest(weight)
    for j in range(weight.size):
        weight[j] = _exp(weight[j] - peak)
    score[first:lowest] = np.float32(0)
    score[length:last] = np.float32(0)
    total = _sum_in_lanes(weight, lanes)
    for j in range(weight.size):
        weight[j] /= total


@kernel
def _greatest(x: Any) -> Any:
    """The largest number: among integers, whose order of comparing the compiler may choose."""
    ordered = x.view(np.int32)
    greatest = np.int32(-(2**31))
    for j in range(ordered.size):
        greatest = max(greatest, _reflect(ordered[j]))
    return np.int32(_reflect(greatest)).view(np.float32)


@kernel
def _reflect(bits: Any) -> Any:
    """Bits of fp32 as integers of the same order, and back: among negative ones it is reversed."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(2**31 - 1))


@kernel
def _sum_in_lanes(x: Any, lanes: Any) -> Any:
    """Sum of whole vectors: each lane in order, then the lanes; eight vectors at a time."""
    lanes[:] = np.float32(0)
    whole = x.size // (8 * LANES)
    for step in range(whole):
        some = x[8 * LANES * step : 8 * LANES * (step + 1)]
        for i in range(LANES):
            lanes[i] = (
                lanes[i] + some[i] + some[i + LANES] + some[i + 2 * LANES] + some[i + 3 * LANES]
                + some[i + 4 * LANES] + some[i + 5 * LANES] + some[i + 6 * LANES]
                + some[i + 7 * LANES]
            )  # fmt: skip
    for j in range(8 * LANES * whole, x.size, LANES):
        some = x[j : j + LANES]
        for lane in range(LANES):
            lanes[lane] += some[lane]
    total = np.float32(0)
    for lane in range(LANES):
        total += lanes[lane]
    return total


# -- the products ---------------------------------------------------------------------------------
# The sums of up to TILE queries, COLUMNS of each, stay in registers while what they are sums of
# passes by, one product after the other.


@kernel
def _score(scratch: Scratch, first: int, last: int, at: int, count: int) -> None:
    """scores[i, at + j] = queries[i] . keys[:, j] for queries first to last - 1 and j < count.

    Whole columns: up to COLUMNS - 1 scores behind the last are written too, and never read.
    """
    queries, keys, scores = scratch.queries, scratch.keys, scratch.scores
    chunks = -(-(last - first) // TILE)
    for j in range(0, count, COLUMNS):
        for chunk in range(chunks):
            i = first + (last - first) * chunk // chunks
            rows = first + (last - first) * (chunk + 1) // chunks - i
            _sum_anew(
                rows,
                queries.ctypes.data + 4 * i * queries.shape[1],
                4 * queries.shape[1],
                keys.ctypes.data + 4 * j,
                4 * keys.shape[1],
                queries.shape[1],
                scores.ctypes.data + 4 * (i * scores.shape[1] + at + j),
                4 * scores.shape[1],
            )


@kernel
def _weigh(scratch: Scratch, first: int, last: int, at: int, skip: int, count: int) -> None:
    """sums[i] += weights[i, at + j] * values[j], queries first to last - 1, skip <= j < count."""
    sums, values, weights = scratch.sums, scratch.values, scratch.scores
    if count <= skip:
        return
    chunks = -(-(last - first) // TILE)
    for d in range(0, sums.shape[1], COLUMNS):
        for chunk in range(chunks):
            i = first + (last - first) * chunk // chunks
            rows = first + (last - first) * (chunk + 1) // chunks - i
            _sum_further(
                rows,
                weights.ctypes.data + 4 * (i * weights.shape[1] + at + skip),
                4 * weights.shape[1],
                values.ctypes.data + 4 * (skip * values.shape[1] + d),
                4 * values.shape[1],
                count - skip,
                sums.ctypes.data + 4 * (i * sums.shape[1] + d),
                4 * sums.shape[1],
            )


def _compile_sums(anew: bool) -> Any:
    def compile_sums(
        _context: Any, rows: Any, x: Any, x_step: Any, m: Any, m_step: Any, count: Any,
        y: Any, y_step: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            num_rows, *rest = arguments
            done = builder.append_basic_block("done")
            choice = builder.switch(num_rows, done)
            for number in range(1, TILE + 1):
                block = builder.append_basic_block(f"rows{number}")
                choice.add_case(num_rows.type(number), block)
                builder.position_at_end(block)
                _write_sums(builder, anew, number, *rest)
                builder.branch(done)
            builder.position_at_end(done)

        return types.void(*[types.int64] * 8), generate

    return compile_sums


def _write_sums(
    builder: Any, anew: bool, rows: int, x: Any, x_step: Any, m: Any, m_step: Any, count: Any,
    y: Any, y_step: Any,
) -> None:  # fmt: skip
    """y[row] (+)= sum over k of x[row, k] m[k], in the order of k; vectors of COLUMNS."""
    int64, number = ir.IntType(64), ir.FloatType()
    columns, lane = ir.VectorType(number, COLUMNS), ir.IntType(32)
    find: Any = cgutils.get_or_insert_function
    of_three = ir.FunctionType(columns, [columns] * 3)
    fma = find(builder.module, of_three, f"llvm.fma.v{COLUMNS}f32")

    def place(base: Any, offset: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

    def broadcast(value: Any) -> Any:
        nothing = ir.Constant(columns, ir.Undefined)
        first = builder.insert_element(nothing, value, lane(0))
        everywhere = ir.Constant(ir.VectorType(lane, COLUMNS), [0] * COLUMNS)
        return builder.shuffle_vector(first, nothing, everywhere)

    x_rows = [builder.mul(x_step, int64(row)) for row in range(rows)]
    y_rows = [place(y, builder.mul(y_step, int64(row)), columns) for row in range(rows)]
    nought = ir.Constant(columns, [0.0] * COLUMNS)
    begun = [nought if anew else builder.load(at, align=4) for at in y_rows]

    before, loop = builder.block, builder.append_basic_block("products")
    after = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(int64)
    sums = [builder.phi(columns) for _ in range(rows)]
    factors = builder.load(place(m, builder.mul(k, m_step), columns), align=4)
    step = builder.shl(k, int64(2))
    grown = []
    for row, total in zip(x_rows, sums, strict=True):
        factor = builder.load(place(x, builder.add(row, step), number))
        grown.append(builder.call(fma, [broadcast(factor), factors, total]))
    following = builder.add(k, int64(1))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    for phi, first, later in [(k, int64(0), following), *zip(sums, begun, grown, strict=True)]:
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)

    builder.position_at_end(after)
    for at, total in zip(y_rows, grown, strict=True):
        builder.store(total, at, align=4)


#: (rows, x, bytes between rows of x, m, bytes between rows of m, rows of m, y, bytes between rows
#: of y): y = x m for up to TILE rows and COLUMNS columns; there is at least one row of m.
_sum_anew: Any = intrinsic(_compile_sums(anew=True))
#: The same, but y += x m.
_sum_further: Any = intrinsic(_compile_sums(anew=False))
