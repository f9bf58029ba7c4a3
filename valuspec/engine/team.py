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

import torch

_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(work: int, argument: int, num_threads: int) -> None:
    """Call the C function at address `work` with the address `argument` from so many threads.

    num_threads: 1, or all threads of torch: a team of another size would be set up anew each time
    """
    if num_threads == 1:
        _Work(work)(argument)
    else:
        _team()(work, argument, num_threads)


def size() -> int:
    """Threads that come when all threads of torch are called: fewer where a limit says so."""
    return _size(torch.get_num_threads())


@memoize
def _size(num_threads: int) -> int:
    came: list[None] = []
    work = _Work(lambda _: came.append(None))
    address = ctypes.cast(work, ctypes.c_void_p).value
    assert address is not None
    run(address, 0, num_threads)
    return len(came)


def bind() -> None:
    """Keep every thread of the caller's team, the caller's own too, on a core of its own.

    When something else takes a core for a moment, the scheduler may let the thread from there share
    a core with another of the team while its own is idle again; and all wait for these two. Does
    nothing where torch has fewer threads than there are cores: others may want the same ones.
    """
    if _team() is _run_in_pool:
        return
    cores = list(os.sched_getaffinity(0))
    if len(cores) != torch.get_num_threads():
        return
    work = _Work(lambda _: os.sched_setaffinity(0, {cores.pop()}))  # one thread at a time: the GIL
    address = ctypes.cast(work, ctypes.c_void_p).value
    assert address is not None
    run(address, 0, len(cores))


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
