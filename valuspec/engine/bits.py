"""Tensors in main memory as numpy arrays, and arrays as compiled kernels like them."""

from __future__ import annotations

import math
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


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """An array that begins at a cache line. Large ones use memory as they are written to."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + CACHE_LINE, np.uint8)
    first = -raw.ctypes.data % CACHE_LINE
    return raw[first : first + size].view(dtype).reshape(shape)
