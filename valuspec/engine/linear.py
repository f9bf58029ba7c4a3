"""Linear layers whose rows do not influence each other.

oneDNN's bf16 product gives a row the same bits whatever the other rows are (except when it is
alone, hence never fewer than two rows). Weights are packed once: same bits, about half the time of
`F.linear` for a few rows, because the packing is not repeated on every call.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class PackedLinear(nn.Module):
    """y = x @ weight.T + bias, for x [num_rows, in] or [1, num_rows, in]."""

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

    __call__ = forward  # no hooks: a step calls each layer, and nn.Module looks for them each time


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and len(weight) > 0  # a rank without logits has an empty head
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
