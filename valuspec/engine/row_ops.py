"""What a block does to each row before its products: normalise it, rotate its heads.

For bf16 in main memory each is one compiled loop: fp32 arithmetic, rounded once to nearest even.
torch would take three to seven operations, and a decoding step pays for each in every layer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from valuspec.engine import row_kernels
from valuspec.engine.bits import as_numpy
from valuspec.engine.row_kernels import RowsNorm

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

    def call(self) -> RowsNorm:
        """What to compute, but for rows, in bf16 in main memory. Valid as long as this object."""
        assert self.scale is not None
        return RowsNorm(scale=self.scale.ctypes.data, size=len(self.scale), eps=self.eps)

    def of_heads(self, x: torch.Tensor) -> None:
        """Replace each head of x [num_rows, heads, size] by its norm."""
        if self.scale is None:
            x.copy_(functional.rms_norm(x, x.shape[-1:], self.weight, self.eps))
            return
        bits = as_numpy(x)
        row_kernels.norm(bits, self.scale, np.float32(self.eps), bits)


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
        bits, normed = self._bits[:, None], self._normed_bits[:, None]
        row_kernels.norm(bits, norm.scale, np.float32(norm.eps), normed)
        return self._normed

    def add(self, residual: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """Add to the hidden state, and return its norm; valid until the next."""
        if norm.scale is None:
            self._hidden.add_(residual)
            return self.norm(norm)
        arguments = (norm.scale, np.float32(norm.eps), self._normed_bits)
        row_kernels.add_and_norm(self._bits, as_numpy(residual), *arguments)
        return self._normed


class Rotary:
    """Rotary position embedding.

    cos, sin: [num_positions, size]; scaling: factor of the query, applied with the rotation
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, scaling: float) -> None:
        self.scaling = scaling
        self.size = cos.shape[1]
        # The rotated half enters with a sign: (-x2, x1) * sin == (x2, x1) * (-sin, sin).
        sign = torch.ones_like(sin[0])
        sign[: len(sign) // 2] = -1
        self.cos, self.sin = cos, sin * sign
        self._compiled = _compiled_for(cos)
        if self._compiled:
            self.cos, self.sin = self.cos.float(), self.sin.float()

    @property
    def num_positions(self) -> int:
        return len(self.cos)

    def at(self, positions: torch.Tensor) -> Angles:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def rotate(self, heads: torch.Tensor, num_queries: int, num_keys: int, angles: Angles) -> None:
        """Rotate the queries and keys of heads [num_rows, queries + keys + others, size] in place.

        Queries come first and are scaled too.
        """
        cos, sin = angles
        if self._compiled:
            scaling = np.float32(self.scaling)
            bits = as_numpy(heads)
            row_kernels.rotate(bits, num_queries, num_keys, cos.numpy(), sin.numpy(), scaling)
            return
        x = heads[:, : num_queries + num_keys]
        turned = x.roll(x.shape[-1] // 2, -1)
        torch.addcmul(x * cos[:, None], turned, sin[:, None], out=x)
        x[:, :num_queries] *= self.scaling


def gated(gate_and_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of [num_rows, 2 * size]."""
    if not _compiled_for(gate_and_up):
        gate, up = gate_and_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    num_rows, width = gate_and_up.shape
    product = gate_and_up.new_empty((num_rows, width // 2))
    row_kernels.gate(as_numpy(gate_and_up.view(num_rows, 2, -1)), as_numpy(product))
    return product
