"""What a block does to each row before its products: normalise it, rotate its heads.

For bf16 in main memory each is one compiled loop: fp32 arithmetic, rounded once to nearest even.
torch would take three to seven operations, and a decoding step pays for each in every layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from valuspec.engine.bits import as_numpy
from valuspec.jit import kernel

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rows, [num_rows, head size] each."""


def _compiled_for(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


class RmsNorm:
    """y = x / rms(x) * weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.detach()
        self.eps = eps
        self.scale = self.weight.float().numpy() if _compiled_for(weight) else None

    def of_heads(self, x: torch.Tensor) -> None:
        """Replace each head of x [num_rows, heads, size] by its norm."""
        if self.scale is None:
            x.copy_(functional.rms_norm(x, x.shape[-1:], self.weight, self.eps))
            return
        bits = as_numpy(x)
        _norm(bits, self.scale, np.float32(self.eps), bits)


class ResidualStream:
    """The hidden state [num_rows, size] that layers add to, and its norm, which they read."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden
        self._compiled = _compiled_for(hidden)
        if self._compiled:
            # Made once a forward: a step would spend as long on views of tensors as on norms.
            self._normed = torch.empty_like(hidden)
            self._bits, self._normed_bits = as_numpy(hidden), as_numpy(self._normed)

    def copy(self) -> torch.Tensor:
        """The hidden state as it is now."""
        return self._hidden.clone()

    def norm(self, norm: RmsNorm) -> torch.Tensor:
        """Norm of the hidden state; valid until the next."""
        if norm.scale is None:
            return functional.rms_norm(self._hidden, self._hidden.shape[-1:], norm.weight, norm.eps)
        _norm(self._bits[:, None], norm.scale, np.float32(norm.eps), self._normed_bits[:, None])
        return self._normed

    def add(self, residual: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """Add to the hidden state, and return its norm; valid until the next."""
        if norm.scale is None:
            self._hidden.add_(residual)
            return self.norm(norm)
        arguments = (norm.scale, np.float32(norm.eps), self._normed_bits)
        _add_and_norm(self._bits, as_numpy(residual), *arguments)
        return self._normed


class Rotary:
    """Rotary position embedding.

    cos, sin: [max_model_len, size]; scaling: factor of the query, applied with the rotation
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, scaling: float) -> None:
        self._scaling = scaling
        # The rotated half enters with a sign: (-x2, x1) * sin == (x2, x1) * (-sin, sin).
        sign = torch.ones_like(sin[0])
        sign[: len(sign) // 2] = -1
        self._cos, self._sin = cos, sin * sign
        self._compiled = _compiled_for(cos)
        if self._compiled:
            self._cos, self._sin = self._cos.float(), self._sin.float()

    def at(self, positions: torch.Tensor) -> Angles:
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def rotate(self, heads: torch.Tensor, num_queries: int, num_keys: int, angles: Angles) -> None:
        """Rotate the queries and keys of heads [num_rows, queries + keys + others, size] in place.

        Queries come first and are scaled too.
        """
        cos, sin = angles
        if self._compiled:
            scaling = np.float32(self._scaling)
            _rotate(as_numpy(heads), num_queries, num_keys, cos.numpy(), sin.numpy(), scaling)
            return
        x = heads[:, : num_queries + num_keys]
        turned = x.roll(x.shape[-1] // 2, -1)
        torch.addcmul(x * cos[:, None], turned, sin[:, None], out=x)
        x[:, :num_queries] *= self._scaling


# -- loops over bits of bf16 ----------------------------------------------------------------------
# `_widen` and `_narrow` stand in `path_kernels` too: kernels call only those of their own file.


@kernel
def _widen(bits: Any) -> Any:
    return np.int32(np.int32(bits) << np.int32(16)).view(np.float32)


@kernel
def _narrow(value: Any) -> Any:
    """To nearest even."""
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.int16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@kernel
def _norm(x: Any, scale: NDArray[np.float32], eps: Any, y: Any) -> None:
    for row in range(x.shape[0]):
        for head in range(x.shape[1]):
            _norm_row(x[row, head], scale, eps, y[row, head])


@kernel
def _add_and_norm(x: Any, residual: Any, scale: NDArray[np.float32], eps: Any, y: Any) -> None:
    for row in range(x.shape[0]):
        values, added = x[row], residual[row]
        for i in range(values.size):
            values[i] = _narrow(_widen(values[i]) + _widen(added[i]))
        _norm_row(values, scale, eps, y[row])


@kernel
def _norm_row(x: Any, scale: NDArray[np.float32], eps: Any, y: Any) -> None:
    total = np.float32(0)
    for i in range(x.size):
        total += _widen(x[i]) * _widen(x[i])
    factor = np.float32(1) / np.sqrt(total / np.float32(x.size) + eps)
    for i in range(x.size):
        y[i] = _narrow(_widen(x[i]) * factor * scale[i])


@kernel
def _rotate(x: Any, num_queries: int, num_keys: int, cos: Any, sin: Any, scaling: Any) -> None:
    for row in range(x.shape[0]):
        for head in range(num_queries):
            _rotate_head(x[row, head], cos[row], sin[row], scaling)
        for head in range(num_queries, num_queries + num_keys):
            _rotate_head(x[row, head], cos[row], sin[row], np.float32(1))


@kernel
def _rotate_head(x: Any, cos: Any, sin: Any, factor: Any) -> None:
    half = x.size // 2
    low, high = x[:half], x[half:]
    for i in range(half):
        a, b = _widen(low[i]), _widen(high[i])
        low[i] = _narrow((a * cos[i] + b * sin[i]) * factor)
        high[i] = _narrow((b * cos[half + i] + a * sin[half + i]) * factor)
