"""Attention that gives a row the same bits in any company: what it must do, and who does it."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from valuspec.engine.kv_cache import KvCache
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.rows import Rows
from valuspec.engine.two_zone import TwoZoneAttention

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """Attention of one forward over one cache."""

    cache: KvCache

    def __init__(self, rows: Rows, cache: KvCache) -> None: ...

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Store the rows' keys and values, and return the attention output.

        qkv:    contiguous [padded rows, heads + 2 * kv heads, head size]: queries, already scaled,
                keys, values
        window: sliding window of this layer; softcap: cap scores by `c * tanh(score / c)`
        Returns [padded rows, heads * head size], valid until the next call. Called once per layer.
        """
        ...


def attention_for(device: torch.device, dtype: torch.dtype) -> type[Attention]:
    """The faster exact attention for a cache of this kind."""
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        return PathAttention
    if device.type == "cuda":
        try:
            from valuspec.engine.triton_attention import TritonAttention

            TritonAttention.try_out(device, dtype)
        except Exception as error:  # not installed, no C compiler, a GPU it does not know, ...
            logger.warning("no Triton kernels for attention: %s", error, exc_info=True)
        else:
            return TritonAttention
    return TwoZoneAttention
