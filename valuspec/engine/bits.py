"""Tensors in main memory as numpy arrays, for compiled kernels."""

from __future__ import annotations

from typing import Any

import torch


def as_numpy(tensor: torch.Tensor) -> Any:
    """The same memory; bf16, which numpy does not know, as its bits (uint16)."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("uint16")
    return tensor.numpy()
