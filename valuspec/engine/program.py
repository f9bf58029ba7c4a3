"""A forward as one call: pieces of work one after the other, each done by all threads together.

Between products, which stream the weights through every cache, Python and torch would find their
own code and data gone: a call of a microsecond takes twenty there, and a forward has hundreds. So
the calls are written down once, and one compiled loop makes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache as memoize
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from valuspec.engine import team
from valuspec.jit import EntryPoint, entry_point, kernel

#: Looks at the other threads' progress before a thread lets others have its core: some 20 us.
_PATIENCE = 500

binding.initialize_native_asmparser()


class _Run(ctypes.Structure):
    _fields_ = (
        ("arrived", ctypes.c_int64),  # threads, counted at every meeting
        ("num_threads", ctypes.c_int64),
        ("steps", ctypes.c_int64),  # -> int64 [num_steps, 2]: addresses of work and argument
        ("num_steps", ctypes.c_int64),
    )


def element(structure: ctypes.Structure) -> np.void:
    """A structure as an element for an array of such."""
    found: np.void = np.frombuffer(bytes(structure), np.dtype(type(structure)))[0]
    return found


class Step(NamedTuple):
    """A call `void work(argument *)` with one element of an array of structures."""

    work: EntryPoint
    arguments: NDArray[np.void]
    place: int = 0

    @property
    def argument(self) -> int:
        """Its address."""
        return int(self.arguments.ctypes.data + self.place * self.arguments.itemsize)


class Program:
    """Steps, each of which ends before the next begins.

    The arrays are read when it runs: their places are fixed, what is in them may change.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)  # keeps what the addresses point to
        self._addresses = np.array([(s.work.address, s.argument) for s in steps], np.int64)
        self._address = self._addresses.ctypes.data

    def run(self, num_threads: int) -> None:
        """Do all of it. num_threads: as `team.size` says, or 1."""
        run = _Run(0, num_threads, self._address, len(self._steps))
        team.run(_entry().address, ctypes.addressof(run), num_threads)


@memoize
def _entry() -> EntryPoint:
    of_run = types.void(types.CPointer(from_dtype(np.dtype(_Run))))  # type: ignore[no-untyped-call]
    return entry_point(of_run, _work_through)


def _work_through(run: Any) -> None:
    r = carray(run, 1)[0]
    steps = carray(_pointer(r.steps), (r.num_steps, 2), np.int64)
    for i in range(r.num_steps):
        _call(steps[i, 0], steps[i, 1])
        _meet(run, (i + 1) * r.num_threads)


@kernel
def _meet(run: Any, everyone: int) -> None:
    """Wait until so many arrivals have been counted, this one included."""
    _arrive(run)
    looks = 0
    while _arrivals(run) < everyone:
        looks += 1
        if looks < _PATIENCE:
            _pause()
        else:
            _let_others()


# -- what the compiler is told by hand ------------------------------------------------------------
# `_pointer` stands in the other files of kernels too: see `valuspec.jit`.


def _compile_pointer(_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _compile_call(_context: Any, work: Any, argument: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], cgutils.voidptr_t)])

    return types.void(types.int64, types.int64), generate


def _compile_arrive(_context: Any, run: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], cgutils.intp_t.as_pointer())
        builder.atomic_rmw("add", counter, cgutils.intp_t(1), "acq_rel")

    return types.void(run), generate


def _compile_arrivals(_context: Any, run: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], cgutils.intp_t.as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(run), generate


def _compile_pause(_context: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, "pause", "", side_effect=True), [])

    return types.void(), generate


def _compile_let_others(_context: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        find: Any = cgutils.get_or_insert_function
        builder.call(find(builder.module, kind, "sched_yield"), [])

    return types.void(), generate


_pointer: Any = intrinsic(_compile_pointer)
_call: Any = intrinsic(_compile_call)
_arrive: Any = intrinsic(_compile_arrive)
_arrivals: Any = intrinsic(_compile_arrivals)
_pause: Any = intrinsic(_compile_pause)
_let_others: Any = intrinsic(_compile_let_others)
