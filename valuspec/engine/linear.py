"""Linear layers whose rows do not influence each other.

Two kinds, for bf16 in main memory. On most x86 processors every element is a sum in one order
(`tile_kernels`). Elsewhere oneDNN's product gives a row the same bits whatever the other rows are,
except when it is alone, hence never fewer than two rows. Either way weights are packed once: the
packing of `F.linear` on every call takes as long as the product of a few rows.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from valuspec.engine import team, tile_kernels
from valuspec.engine.bits import Slabs, aligned_zeros
from valuspec.engine.tile_kernels import OUTPUTS, Product


class Linear(Protocol):
    """y = x @ weight.T + bias, for x [num_rows, in] or [1, num_rows, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest linear layer with weight [out, in] on its device."""
    if TiledLinear.takes(weight):
        return TiledLinear(weight, bias)
    return PackedLinear(weight, bias)


def fused(*linears: nn.Linear) -> Linear:
    """One product for several layers that read the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if linears[0].bias is None:
        return packed(weight)
    return packed(weight, torch.cat([linear.bias.detach() for linear in linears]))


_slabs = Slabs()


class TiledLinear(nn.Module):
    """Products in tiles, on torch's threads."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        num_outputs, size = weight.shape
        self.num_outputs = num_outputs
        self._work = tile_kernels.entry()
        pairs = weight.detach().contiguous().view(torch.int32).numpy()
        self._weight = _slabs.zeros((num_outputs // OUTPUTS, size // 2, OUTPUTS), np.int32)
        self._weight[:] = pairs.reshape(-1, OUTPUTS, size // 2).transpose(0, 2, 1)
        self._bias = aligned_zeros((num_outputs,), np.float32)
        if bias is not None:
            self._bias[:] = bias.detach().float().numpy()

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Whether there are tiles for a weight [out, in]."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and len(weight) > 0  # a rank without logits has an empty head
            and len(weight) % OUTPUTS == 0
            and weight.shape[1] % 2 == 0
            and tile_kernels.supported()
        )

    def product(self) -> Product:
        """What to compute, but for rows: x, y and num_rows. Valid as long as this object."""
        return Product(
            weight=self._weight.ctypes.data,
            bias=self._bias.ctypes.data,
            num_pairs=self._weight.shape[1],
            num_units=self._weight.shape[0],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.num_outputs))
        product = self.product()
        product.x, product.y = x.data_ptr(), y.data_ptr()
        product.num_rows = x.numel() // x.shape[-1]
        team.run(self._work.address, ctypes.addressof(product), torch.get_num_threads())
        return y

    __call__ = forward  # no hooks: a step calls each layer, and nn.Module looks for them each time


class PackedLinear(nn.Module):
    """Products by oneDNN, or whatever torch has on other devices and for other dtypes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self._packed = _can_pack(weight)
        self.weight = weight.detach()
        if self._packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        self.bias = bias.detach() if bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return y
        return functional.linear(x, self.weight, self.bias)

    __call__ = forward


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and len(weight) > 0
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
