"""The lean block's layers as one program, for bf16 in main memory.

The same arithmetic as layer by layer, to the bit; what is gained is the time between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine import path_kernels, row_kernels, team, tile_kernels
from valuspec.engine.linear import TiledLinear
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.path_kernels import Call
from valuspec.engine.program import Program, Step
from valuspec.engine.row_kernels import RowsCopy, RowsGate, RowsNorm, RowsRotation
from valuspec.engine.row_ops import Angles, RmsNorm, Rotary
from valuspec.engine.tile_kernels import OUTPUTS, Product

if TYPE_CHECKING:
    from valuspec.engine.decoder import Layer


class CompiledLayers:
    """Arguments of all calls of a forward, by kind and layer.

    What is known of a layer is written once, addresses of activations before every forward.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        last_norm: RmsNorm,
        rotary: Rotary,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        """layers: whose linear layers are all tiled; last_norm: what the head reads"""
        self._layers = layers
        self._windows = [layer.window for layer in layers]
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.post_norm)]
        count = len(layers)
        self._products = np.array([[_product(x) for x in layer.linears] for layer in layers])
        self._norms = np.array([_norm(norm) for norm in (*norms, last_norm)])
        self._rotations = np.zeros(count, np.dtype(RowsRotation))
        for rotation, layer in zip(self._rotations, layers, strict=True):
            rotation["num_queries"], rotation["num_keys"] = num_heads, num_kv_heads
            rotation["scaling"], rotation["size"] = rotary.scaling, rotary.size
            for name, norm in (("query_scale", layer.q_norm), ("key_scale", layer.k_norm)):
                if norm is not None:
                    rotation[name], rotation["eps"] = _norm(norm)["scale"], norm.eps
        self._calls = np.zeros(count, np.dtype(Call))
        self._gates = np.zeros(count, np.dtype(RowsGate))
        self._feature_layers: tuple[int, ...] = ()
        self._copies = np.zeros(0, np.dtype(RowsCopy))
        self._program = self._write_down()

    @classmethod
    def of(cls, layers: Sequence[Layer], *others: Any) -> CompiledLayers | None:
        """None where not all linear layers are tiled."""
        tiled = all(isinstance(linear, TiledLinear) for x in layers for linear in x.linears)
        return cls(layers, *others) if tiled else None

    def forward(
        self,
        hidden: torch.Tensor,
        angles: Angles,
        attention: PathAttention,
        *,
        feature_layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last norm of the hidden state [num_rows, size], and what `feature_layers` read."""
        num_rows, size = hidden.shape
        if feature_layers != self._feature_layers:
            self._copy_out(feature_layers, size)
        qkv_width, _, gate_up_width, _ = (OUTPUTS * self._products[0]["num_units"]).tolist()
        qkv = hidden.new_empty((num_rows, qkv_width))
        gate_up = hidden.new_empty((num_rows, gate_up_width))
        gated = hidden.new_empty((num_rows, gate_up_width // 2))
        normed, residual = torch.empty_like(hidden), torch.empty_like(hidden)
        features = hidden.new_empty((num_rows, len(feature_layers) * size))
        num_threads = team.size()
        mixed = attention.prepare(self._calls, qkv.data_ptr(), self._windows, num_threads)

        _give(
            self._products, num_rows,
            x=_addresses(normed, mixed, normed, gated),
            y=_addresses(qkv, residual, gate_up, residual),
        )  # fmt: skip
        _give(self._norms, num_rows, x=hidden.data_ptr(), y=normed.data_ptr())
        self._norms["residual"][1:] = residual.data_ptr()  # before the first layer there is none
        cos, sin = _addresses(*angles)
        _give(self._rotations, num_rows, heads=qkv.data_ptr(), cos=cos, sin=sin)
        _give(self._gates, num_rows, x=gate_up.data_ptr(), y=gated.data_ptr(), size=gated.shape[1])
        _give(self._copies, num_rows, x=hidden.data_ptr(), y=features.data_ptr())
        self._program.run(num_threads)
        return normed, features if feature_layers else None

    def _copy_out(self, feature_layers: tuple[int, ...], size: int) -> None:
        self._feature_layers = feature_layers
        self._copies = np.zeros(len(feature_layers), np.dtype(RowsCopy))
        self._copies["size"], self._copies["width"] = size, len(feature_layers) * size
        self._copies["first"] = np.arange(len(feature_layers)) * size
        self._program = self._write_down()

    def _write_down(self) -> Program:
        multiply, attend = tile_kernels.entry(), path_kernels.entry(np.int16)
        store, normalise = path_kernels.store_entry(), row_kernels.entry(RowsNorm)
        rotate, gate = row_kernels.entry(RowsRotation), row_kernels.entry(RowsGate)
        steps = [Step(normalise, self._norms, 0)]
        for index, products in enumerate(self._products):
            if index in self._feature_layers:
                copy = self._feature_layers.index(index)
                steps.append(Step(row_kernels.entry(RowsCopy), self._copies, copy))
            steps += [
                Step(multiply, products, 0),
                Step(rotate, self._rotations, index),
                Step(store, self._calls, index),
                Step(attend, self._calls, index),
                Step(multiply, products, 1),
                Step(normalise, self._norms, 2 * index + 1),
                Step(multiply, products, 2),
                Step(gate, self._gates, index),
                Step(multiply, products, 3),
                Step(normalise, self._norms, 2 * index + 2),
            ]
        return Program(steps)


def _product(linear: Any) -> np.void:
    found: np.void = np.frombuffer(bytes(linear.product()), np.dtype(Product))[0]
    return found


def _norm(norm: RmsNorm) -> np.void:
    assert norm.scale is not None  # bf16 in main memory
    written: np.void = np.zeros(1, np.dtype(RowsNorm))[0]
    written["scale"], written["size"] = norm.scale.ctypes.data, len(norm.scale)
    written["eps"] = norm.eps
    return written


def _give(arguments: NDArray[np.void], num_rows: int, **fields: Any) -> None:
    """Write fields of all elements; nothing is taken yet."""
    arguments["taken"], arguments["num_rows"] = 0, num_rows
    for name, value in fields.items():
        arguments[name] = value


def _addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
