"""Compile numeric kernels with numba, typed for the rest of the code.

numba keys its on-disk cache by the file of the compiled function alone. A kernel therefore calls
only kernels of its own file and reads only constants of its own file; otherwise an edit elsewhere
would leave a stale compiled copy behind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as memoize
from typing import Protocol, TypeVar, cast

from llvmlite import binding
from numba import cfunc, njit
from numba.core import config


@memoize
def features() -> frozenset[str]:
    """What kernels may use of this processor, in LLVM's names; all, or NUMBA_CPU_FEATURES."""
    said = config.CPU_FEATURES  # type: ignore[attr-defined]
    if said is not None:
        return frozenset(name[1:] for name in said.split(",") if name.startswith("+"))
    return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)


F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile `function` to machine code on first call; releases the GIL while it runs.

    Division by zero is not looked for: looking would keep loops with a division from vectors.
    """
    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(function))


class EntryPoint(Protocol):
    """A function that C can call. Its code lives as long as this object."""

    address: int


def entry_point(signature: object, function: Callable[..., None]) -> EntryPoint:
    """Compile `function`, which may call kernels of its file, for callers from C."""
    return cast(EntryPoint, cfunc(signature, cache=True)(function))
