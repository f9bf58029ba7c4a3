"""A forward of the lean block's model as one program, for bf16 in main memory.

The same arithmetic as layer by layer, to the bit; what is gained is the time between. Whatever can
be written down before a forward has been: activations keep their places from one to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from valuspec.engine import path_kernels, row_kernels, team, tile_kernels
from valuspec.engine.bits import aligned_zeros
from valuspec.engine.linear import TiledLinear
from valuspec.engine.path_attention import PathAttention, describe
from valuspec.engine.path_kernels import Call
from valuspec.engine.program import Program, Step, element
from valuspec.engine.row_kernels import RowsCopy, RowsGate, RowsNorm, RowsPick, RowsRotation
from valuspec.engine.row_ops import RmsNorm, Rotary
from valuspec.engine.rows import Rows
from valuspec.engine.tile_kernels import OUTPUTS
from valuspec.jit import kernel

if TYPE_CHECKING:
    from valuspec.engine.decoder import Layer

#: Rows there is room for at first.
ROOM = 64


class CompiledForward:
    """Arguments of all calls of a forward, by kind and layer, and the activations between them.

    One forward at a time: the next one writes where the last one did, but for what was returned.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        embedding: torch.Tensor,
        rotary: Rotary,
        last_norm: RmsNorm,
        head: TiledLinear,
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        """layers: whose linear layers are all tiled; last_norm: what the head reads"""
        self._kept = layers, embedding, rotary, last_norm, head  # addresses point into them
        self._limits = np.array([len(embedding), rotary.num_positions], np.int64)
        self._size = embedding.shape[1]
        self._vocab_size = head.num_outputs
        windows = [layer.window for layer in layers]
        self._windows = list(dict.fromkeys(windows))
        self._window_of_layer = np.array([self._windows.index(window) for window in windows])
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.post_norm)]
        tiled: list[tuple[Any, ...]] = [layer.linears for layer in layers]
        self._products = np.array([[element(x.product()) for x in linears] for linears in tiled])
        self._head = np.array([element(head.product())])
        self._norms = np.array([element(norm.call()) for norm in (*norms, last_norm)])
        self._rotations = np.array([_rotation(rotary, layer) for layer in layers])
        self._rotations["num_queries"] = num_heads
        self._rotations["num_keys"] = num_kv_heads
        self._calls = np.zeros(len(layers), np.dtype(Call))
        self._gates = np.zeros(len(layers), np.dtype(RowsGate))
        self._embed, self._pick = np.zeros((2, 1), np.dtype(RowsPick))
        self._embed["x"], self._embed["num_choices"] = embedding.data_ptr(), len(embedding)
        self._embed["size"] = self._pick["size"] = self._size
        self._copies = np.zeros(0, np.dtype(RowsCopy))
        self._feature_layers: tuple[int, ...] = ()
        self._cache: weakref.ref[Any] | None = None
        self._scratch = aligned_zeros((1,), np.float32)
        self._make_room(ROOM)
        self._program = self._write_down()

    @classmethod
    def of(
        cls, layers: Sequence[Layer], embedding: torch.Tensor, rotary: Rotary, last_norm: RmsNorm,
        head: Any, num_heads: int, num_kv_heads: int,
    ) -> CompiledForward | None:  # fmt: skip
        """None where not all linear layers are tiled."""
        linears = [*(linear for layer in layers for linear in layer.linears), head]
        if not all(isinstance(linear, TiledLinear) for linear in linears):
            return None
        return cls(layers, embedding, rotary, last_norm, head, num_heads, num_kv_heads)

    def forward(
        self, rows: Rows, attention: PathAttention, feature_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [len(rows.logit_rows), vocabulary], and what `feature_layers` read."""
        num_rows, num_logits = len(rows.token_ids), len(rows.logit_rows)
        if not within(
            rows.token_ids.numpy(), rows.positions.numpy(), rows.logit_rows.numpy(), self._limits
        ):  # compiled code follows these numbers without looking
            raise IndexError("a token id, a position or a row to predict from is out of range")
        if feature_layers != self._feature_layers:
            self._copy_out(feature_layers)
        if num_rows > self._room:
            self._make_room(num_rows)
        features = torch.empty((num_rows, len(feature_layers) * self._size), dtype=torch.bfloat16)
        logits = torch.empty((num_logits, self._vocab_size), dtype=torch.bfloat16)
        num_threads = team.size()
        self._attend(attention, num_threads)
        for arguments in (
            self._products, self._norms, self._rotations, self._gates, self._copies, self._embed,
        ):  # fmt: skip
            arguments["taken"], arguments["num_rows"] = 0, num_rows
        for arguments in (self._pick, self._head):
            arguments["taken"], arguments["num_rows"] = 0, num_logits
        self._embed["picked"] = rows.token_ids.data_ptr()
        self._rotations["positions"] = rows.positions.data_ptr()
        self._copies["y"] = features.data_ptr()
        self._pick["picked"], self._pick["num_choices"] = rows.logit_rows.data_ptr(), num_rows
        self._head["y"] = logits.data_ptr()
        self._program.run(num_threads)
        return logits, features if feature_layers else None

    def _attend(self, attention: PathAttention, num_threads: int) -> None:
        """Tell the calls what to attend to."""
        if self._cache is None or self._cache() is not attention.cache:
            describe(attention.cache, self._calls)
            self._cache = weakref.ref(attention.cache)
        floats = num_threads * attention.floats_of_scratch
        if floats > len(self._scratch):
            self._scratch = aligned_zeros((2 * floats,), np.float32)
            self._calls["scratch"] = self._scratch.ctypes.data
        self._calls_taken[:] = 0
        paths = attention.write(self._calls, self._windows)
        self._calls["paths"] = paths[self._window_of_layer]

    def _make_room(self, num_rows: int) -> None:
        """Give activations of so many rows, or a few more, their places."""
        self._room = max(ROOM, 1 << (num_rows - 1).bit_length())
        qkv_width, _, gate_up_width, _ = (OUTPUTS * self._products[0]["num_units"]).tolist()
        mixed_width = 2 * int(self._products[0, 1]["num_pairs"])
        gated_width = gate_up_width // 2
        widths = (*[self._size] * 4, qkv_width, mixed_width, gate_up_width, gated_width)
        self._activations = [aligned_zeros((self._room, w), np.int16) for w in widths]
        hidden, normed, residual, picked, qkv, mixed, gate_up, gated = (
            activation.ctypes.data for activation in self._activations
        )
        self._products["x"] = [normed, mixed, normed, gated]
        self._products["y"] = [qkv, residual, gate_up, residual]
        self._norms["x"], self._norms["y"] = hidden, normed
        self._norms["residual"][1:] = residual  # before the first layer there is none
        self._rotations["heads"] = self._calls["qkv"] = qkv
        self._calls["out"] = mixed
        self._gates["x"], self._gates["y"], self._gates["size"] = gate_up, gated, gated_width
        self._embed["y"] = self._copies["x"] = hidden
        self._pick["x"], self._pick["y"], self._head["x"] = normed, picked, picked
        self._calls_taken = np.zeros((len(self._calls), 3), np.int64)
        self._calls["taken"] = (
            self._calls_taken.ctypes.data
            + np.arange(len(self._calls)) * self._calls_taken.strides[0]
        )

    def _copy_out(self, feature_layers: tuple[int, ...]) -> None:
        self._feature_layers = feature_layers
        self._copies = np.zeros(len(feature_layers), np.dtype(RowsCopy))
        self._copies["x"] = self._embed["y"]
        self._copies["size"], self._copies["width"] = self._size, len(feature_layers) * self._size
        self._copies["first"] = np.arange(len(feature_layers)) * self._size
        self._program = self._write_down()

    def _write_down(self) -> Program:
        multiply, attend = tile_kernels.entry(), path_kernels.entry(np.int16)
        store, normalise = path_kernels.store_entry(), row_kernels.entry(RowsNorm)
        rotate, gate = row_kernels.entry(RowsRotation), row_kernels.entry(RowsGate)
        pick = row_kernels.entry(RowsPick)
        steps = [Step(pick, self._embed), Step(normalise, self._norms)]
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
        return Program([*steps, Step(pick, self._pick), Step(multiply, self._head)])


def _rotation(rotary: Rotary, layer: Layer) -> np.void:
    written: np.void = np.zeros(1, np.dtype(RowsRotation))[0]
    written["cos"], written["sin"] = rotary.cos.data_ptr(), rotary.sin.data_ptr()
    written["num_positions"], written["size"] = rotary.num_positions, rotary.size
    written["scaling"] = rotary.scaling
    for name, norm in (("query_scale", layer.q_norm), ("key_scale", layer.k_norm)):
        if norm is not None:
            written[name], written["eps"] = norm.call().scale, norm.eps
    return written


@kernel
def within(token_ids: Any, positions: Any, logit_rows: Any, limits: Any) -> bool:
    """Whether compiled code may follow these numbers of rows.

    limits: tokens and positions there are
    """
    for row in range(token_ids.size):
        if not (0 <= token_ids[row] < limits[0] and 0 <= positions[row] < limits[1]):
            return False
    for row in logit_rows:  # noqa: SIM110  (numba compiles no generators)
        if not 0 <= row < token_ids.size:
            return False
    return True
