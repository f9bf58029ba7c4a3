"""Tensors in main memory as numpy arrays, and arrays as compiled kernels like them."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

CACHE_LINE = 64
"""Bytes. A vector register is as wide, and loads that straddle two lines take twice the time."""


def as_numpy(tensor: torch.Tensor) -> Any:
    """The same memory; bf16, which numpy does not know, as its bits (int16)."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()


def address(array: Any) -> int:
    """Where an array begins; `array.ctypes` takes several times as long."""
    where: int = array.__array_interface__["data"][0]
    return where


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """An array that begins at a cache line. Large ones use memory as they are written to."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + CACHE_LINE, np.uint8)
    first = -raw.ctypes.data % CACHE_LINE
    return raw[first : first + size].view(dtype).reshape(shape)


_HUGE_PAGE = 2 << 20
_SLAB = 64 << 20


class Slabs:
    """Memory for what is read from end to end again and again, in the largest pages there are.

    With small pages a product waits for page tables: it takes a sixth longer. Arrays share slabs;
    a slab lives as long as any of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # models may be loaded side by side
        self._slab: Any = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array that begins at a cache line."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        padded = -(-size // CACHE_LINE) * CACHE_LINE
        with self._lock:
            if padded > len(self._slab):
                # numpy asks for huge pages for arrays as large as this, where the system leaves it
                # to programs; they begin at whole ones.
                raw = np.zeros(max(padded, _SLAB) + _HUGE_PAGE, np.uint8)
                self._slab = raw[-raw.ctypes.data % _HUGE_PAGE :]
            part, self._slab = self._slab[:padded], self._slab[padded:]
        return part[:size].view(dtype).reshape(shape)
