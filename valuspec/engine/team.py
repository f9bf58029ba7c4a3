"""Compiled work on the threads that torch computes on.

Threads of our own would compete with torch's, which wait for the next operation in a busy loop.
GCC's OpenMP library starts a team of its threads with one call, `GOMP_parallel`; where torch runs
on another library, a pool of Python threads takes its place.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache as memoize

_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(work: int, argument: int, num_threads: int) -> None:
    """Call the C function at address `work` with the address `argument` from so many threads.

    num_threads: 1, or all threads of torch: a team of another size would be set up anew each time
    """
    if num_threads == 1:
        _Work(work)(argument)
    else:
        _team()(work, argument, num_threads)


@memoize
def _team() -> Callable[[int, int, int], None]:
    try:
        # The copy that is loaded already, if torch has loaded one, and no other.
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
        parallel = library.GOMP_parallel
    except (OSError, AttributeError):
        return _run_in_pool
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return lambda work, argument, num_threads: parallel(work, argument, num_threads, 0)


def _run_in_pool(work: int, argument: int, num_threads: int) -> None:
    call = _Work(work)
    others = [_pool(num_threads - 1).submit(call, argument) for _ in range(num_threads - 1)]
    call(argument)
    for other in others:
        other.result()


@memoize
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=size)
