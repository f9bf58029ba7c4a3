"""A draft head's steps as compiled programs, for bf16 in main memory.

Behind a forward of the target every cache is cold, and a step of torch operations takes three times
as long as its weights take to come from memory. See `valuspec.engine.compiled_forward`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.tree import Likeliest
from valuspec.engine import path_kernels, row_kernels, team, tile_kernels
from valuspec.engine.bits import address, aligned_zeros
from valuspec.engine.compiled_forward import ROOM, within
from valuspec.engine.kv_cache import KvCache
from valuspec.engine.linear import TiledLinear, fused
from valuspec.engine.path_attention import PathAttention, describe
from valuspec.engine.path_kernels import Call
from valuspec.engine.program import Program, Step, element
from valuspec.engine.row_kernels import (
    RowsCopy,
    RowsGate,
    RowsNorm,
    RowsPick,
    RowsRotation,
    RowsTop,
)
from valuspec.engine.row_ops import RmsNorm
from valuspec.engine.rows import Rows


class CompiledHead:
    """See `valuspec.eagle3.drafter.Steps`. The state between two steps lies in the activations."""

    def __init__(
        self, head: DraftHead, cache: KvCache, top_k: int, num_positions: int, most_rows: int
    ) -> None:
        """num_positions: for which angles are laid out; most_rows: nodes to expand at a time"""
        config, layer = head.config, head.midlayer
        self._config, self._top_k = config, top_k
        self._embedding = head.embedding.contiguous()
        self._limits = np.array([len(self._embedding), num_positions], np.int64)
        attention, mlp = layer.self_attn, layer.mlp
        linears: list[Any] = [
            fused(head.fc),
            fused(attention.q_proj, attention.k_proj, attention.v_proj),
            fused(attention.o_proj),
            fused(mlp.gate_proj, mlp.up_proj),
            fused(mlp.down_proj),
            fused(head.lm_head),
        ]
        norms = [
            layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm,
        ]  # fmt: skip
        if config.norm_before_fc:
            norms.append(head.input_norm)
        packed = [RmsNorm(norm.weight, config.rms_norm_eps) for norm in norms]
        self._products = np.array([element(linear.product()) for linear in linears])
        self._norms = np.array([element(norm.call()) for norm in packed])
        self._rotation = np.zeros(1, np.dtype(RowsRotation))
        self._angles = _signed(head, num_positions)
        self._rotation["cos"], self._rotation["sin"] = (a.ctypes.data for a in self._angles)
        self._rotation["num_positions"], self._rotation["size"] = num_positions, config.head_size
        self._rotation["scaling"] = config.head_size**-0.5
        self._rotation["num_queries"] = config.num_heads
        self._rotation["num_keys"] = config.num_kv_heads
        if config.qk_norm:
            of_heads = [RmsNorm(n.weight, config.rms_norm_eps)
                        for n in (attention.q_norm, attention.k_norm)]  # fmt: skip
            packed += of_heads
            self._rotation["query_scale"], self._rotation["key_scale"] = (
                norm.call().scale for norm in of_heads
            )
            self._rotation["eps"] = config.rms_norm_eps
        self._kept = linears, packed, cache  # addresses point into them
        # The first call stores keys and values, the second one attends.
        self._calls = np.zeros(2, np.dtype(Call))
        for call in (self._calls[:1], self._calls[1:]):
            describe(cache, call)
        self._taken = np.zeros((2, 3), np.int64)
        self._calls["taken"] = self._taken.ctypes.data + np.arange(2) * self._taken.strides[0]
        self._picks = np.zeros(4, np.dtype(RowsPick))  # handed on, embedding, qkv, residual
        self._copies = np.zeros(2, np.dtype(RowsCopy))
        self._gate = np.zeros(1, np.dtype(RowsGate))
        self._top = np.zeros(1, np.dtype(RowsTop))
        self._scratch = aligned_zeros((1,), np.float32)
        self._num_handed_on, self._most_rows = 0, most_rows
        self._make_room(ROOM)
        self._write_down()

    @staticmethod
    def takes(head: DraftHead) -> bool:
        """Whether there are tiles for all of a head's products; not if `PlainHead` has it."""
        weights = [m.weight for m in head.modules() if isinstance(m, torch.nn.Linear)]
        tiled = len(weights) > 0 and all(TiledLinear.takes(weight) for weight in weights)
        return tiled and head.embedding.dtype == torch.bfloat16

    def catch_up(
        self, features: torch.Tensor, rows: Rows, known: PathAttention, ends: PathAttention
    ) -> Likeliest:
        """See `Steps`."""
        expected = (len(rows.token_ids), 3 * self._config.target_hidden_size)
        if features.shape != expected or features.dtype != torch.bfloat16:
            raise ValueError(f"features {tuple(features.shape)}, {features.dtype}: not {expected}")
        features = features.contiguous()
        fc, fc_norm = self._products[:1], self._norms[4:]
        fc["x"] = fc_norm["x"] = features.data_ptr()
        if self._config.norm_before_fc:
            self._room_for(len(features))
            fc["x"] = fc_norm["y"]
        return self._run(self._catching_up, rows, known, ends)

    def expand(self, parents: NDArray[np.int64], rows: Rows, attention: PathAttention) -> Likeliest:
        """See `Steps`."""
        if not within(parents, parents, parents[:0], np.full(2, self._num_handed_on)):
            raise IndexError("a node follows a row that was not computed")
        self._picks["picked"][0] = address(parents)
        return self._run(self._expanding, rows, attention, attention)

    def _run(
        self, program: Program, rows: Rows, known: PathAttention, ends: PathAttention
    ) -> Likeliest:
        num_rows, num_ends = len(rows.token_ids), len(rows.logit_rows)
        if not within(
            rows.token_ids.numpy(), rows.positions.numpy(), rows.logit_rows.numpy(), self._limits
        ):
            raise IndexError("a token id, a position or a row to predict from is out of range")
        self._room_for(num_rows)
        num_threads = team.size()
        floats = num_threads * ends.floats_of_scratch
        if floats > len(self._scratch):
            self._scratch = aligned_zeros((2 * floats,), np.float32)
            self._calls["scratch"] = self._scratch.ctypes.data
        self._taken[:] = 0
        for attention, call in ((known, self._calls[:1]), (ends, self._calls[1:])):
            call["paths"] = attention.write(call, [None])
        for arguments, before_attention in (
            (self._products, 2), (self._norms, 2), (self._picks, 2),
        ):  # fmt: skip
            arguments["taken"] = 0
            arguments["num_rows"] = num_ends
            arguments["num_rows"][:before_attention] = num_rows
        self._norms["num_rows"][4:] = num_rows
        for arguments, count in (
            (self._rotation, num_rows), (self._copies, num_rows), (self._gate, num_ends),
            (self._top, num_ends),
        ):  # fmt: skip
            arguments["taken"], arguments["num_rows"] = 0, count
        self._rotation["positions"] = rows.positions.data_ptr()
        self._picks["picked"][1:] = [
            rows.token_ids.data_ptr(), rows.logit_rows.data_ptr(), rows.logit_rows.data_ptr(),
        ]  # fmt: skip
        self._picks["num_choices"] = [
            self._num_handed_on, len(self._embedding), num_rows, num_rows,
        ]  # fmt: skip
        ids = np.empty((num_ends, self._top_k), np.int64)
        log_p = np.empty((num_ends, self._top_k), np.float32)
        self._top["ids"], self._top["log_p"] = address(ids), address(log_p)
        program.run(num_threads)
        self._num_handed_on = num_ends
        return ids, log_p

    def _room_for(self, num_rows: int) -> None:
        if num_rows > self._room:
            self._make_room(num_rows)

    def _make_room(self, num_rows: int) -> None:
        """Give activations of so many rows, or a few more, their places.

        Nothing of the step before is kept: `catch_up` reads nothing of it, and for what is expanded
        there is room from the beginning.
        """
        config = self._config
        self._room = 1 << (max(ROOM, self._most_rows, num_rows) - 1).bit_length()
        size, mixed_size = config.hidden_size, config.num_heads * config.head_size
        qkv_size = mixed_size + 2 * config.num_kv_heads * config.head_size
        widths = (
            *[size] * 4, 2 * size, qkv_size, qkv_size, *[size] * 3, mixed_size,
            2 * config.intermediate_size, config.intermediate_size, config.draft_vocab_size,
            3 * config.target_hidden_size,
        )  # fmt: skip
        self._activations = [aligned_zeros((self._room, width), np.int16) for width in widths]
        (
            hidden, embedded, normed_embedded, normed, joined, qkv, picked_qkv, picked, residual,
            normed_end, mixed, gate_up, gated, logits, normed_features,
        ) = (activation.ctypes.data for activation in self._activations)  # fmt: skip
        self._products["x"][1:] = [joined, mixed, normed_end, gated, normed_end]
        self._products["y"] = [hidden, qkv, residual, gate_up, residual, logits]
        self._norms["x"][:4] = [embedded, hidden, picked, picked]
        self._norms["y"][:4] = [normed_embedded, normed, normed_end, normed_end]
        self._norms["residual"][2:4] = residual
        self._norms["y"][4:] = normed_features
        begun = normed if config.norm_before_residual else hidden
        handed_on = normed_end if config.norm_output else picked
        self._picks["x"] = [handed_on, self._embedding.data_ptr(), qkv, begun]
        self._picks["y"] = [hidden, embedded, picked_qkv, picked]
        self._picks["size"] = [size, size, qkv_size, size]
        self._copies["x"], self._copies["y"] = [normed_embedded, normed], joined
        self._copies["first"] = [0, size]
        self._copies["size"], self._copies["width"] = size, 2 * size
        self._rotation["heads"] = qkv
        self._calls["qkv"], self._calls["out"] = [qkv, picked_qkv], mixed
        self._gate["x"], self._gate["y"], self._gate["size"] = (
            gate_up, gated, config.intermediate_size,
        )  # fmt: skip
        self._top["logits"], self._top["size"] = logits, config.draft_vocab_size
        self._top["count"] = self._top_k

    def _write_down(self) -> None:
        multiply, attend = tile_kernels.entry(), path_kernels.entry(np.int16)
        normalise, pick = row_kernels.entry(RowsNorm), row_kernels.entry(RowsPick)
        copy = row_kernels.entry(RowsCopy)
        products, norms, picks = self._products, self._norms, self._picks
        fuse = [Step(multiply, products, 0)]
        if self._config.norm_before_fc:
            fuse.insert(0, Step(normalise, norms, 4))
        layer = [
            Step(pick, picks, 1),
            Step(normalise, norms, 0),
            Step(normalise, norms, 1),
            Step(copy, self._copies, 0),
            Step(copy, self._copies, 1),
            Step(multiply, products, 1),
            Step(row_kernels.entry(RowsRotation), self._rotation),
            Step(path_kernels.store_entry(), self._calls, 0),
            Step(pick, picks, 2),
            Step(pick, picks, 3),
            Step(attend, self._calls, 1),
            Step(multiply, products, 2),
            Step(normalise, norms, 2),
            Step(multiply, products, 3),
            Step(row_kernels.entry(RowsGate), self._gate),
            Step(multiply, products, 4),
            Step(normalise, norms, 3),
            Step(multiply, products, 5),
            Step(row_kernels.entry(RowsTop), self._top),
        ]
        self._catching_up = Program([*fuse, *layer])
        self._expanding = Program([Step(pick, picks, 0), *layer])


def _signed(head: DraftHead, num_positions: int) -> tuple[Any, Any]:
    """Cosines and sines, float32 [num_positions, size], as `RowsRotation` wants them."""
    cos, sin = head.angles(num_positions).unbind(1)
    return torch.cat([cos, cos], -1).numpy(), torch.cat([-sin, sin], -1).numpy()
