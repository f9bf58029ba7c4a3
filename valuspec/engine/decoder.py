"""The target's forward pass: one lean block for the Llama family, transformers' modules otherwise.

Both read `Rows`, store keys and values and attend through `Attention`, and return logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from valuspec.engine.attention import Attention
from valuspec.engine.compiled_forward import CompiledForward
from valuspec.engine.linear import Linear, fused, packed
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.ranks import RankGroup, RowSplitLinear
from valuspec.engine.row_ops import Angles, ResidualStream, RmsNorm, Rotary, gated
from valuspec.engine.rows import Rows
from valuspec.errors import ModelError

#: Architectures whose block is: RMSNorm, rotary grouped-query attention (optional biases and
#: q/k norms), RMSNorm, SwiGLU, both residual.
LEAN_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
#: Rotary variants whose angles depend on the position alone.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


class Decoder(Protocol):
    """A target model's forward pass.

    fewest_rows: to which, or a multiple of which, a forward must be padded
    """

    fewest_rows: int

    def forward(self, rows: Rows, attention: Attention) -> torch.Tensor:
        """Return logits [len(rows.logit_rows), vocabulary]; `attention` was made for `rows`."""
        ...


def is_lean(config: Any) -> bool:
    """Whether models of this configuration have the lean block."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return config.model_type in LEAN_MODEL_TYPES and rope in STATIC_ROPE_TYPES


def build_decoder(
    model: PreTrainedModel, max_model_len: int, group: RankGroup | None = None
) -> Decoder:
    """Choose the decoder for a loaded transformers model, or for a rank's shard of a lean one."""
    if is_lean(model.config):
        return LeanDecoder(model, max_model_len, group)
    return TransformersDecoder(model)


@dataclass(slots=True)
class Layer:
    input_norm: RmsNorm
    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    output: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In the order of a forward."""
        return self.qkv, self.output, self.gate_up, self.down


class LeanDecoder:
    """Llama, Mistral, Qwen2, Qwen3, SmolLM: few operations per layer, packed linear layers."""

    def __init__(self, model: Any, max_model_len: int, group: RankGroup | None = None) -> None:
        config = model.config
        attention = model.model.layers[0].self_attn
        self.head_size: int = attention.head_dim
        self.num_heads: int = len(attention.q_proj.weight) // self.head_size
        self.num_kv_heads: int = len(attention.k_proj.weight) // self.head_size
        self.embedding: torch.Tensor = model.model.embed_tokens.weight.detach()
        self.norm = RmsNorm(model.model.norm.weight, config.rms_norm_eps)
        self.head = packed(model.lm_head.weight, model.lm_head.bias)
        self.layers = [_pack_layer(layer, config, group) for layer in model.model.layers]
        with torch.inference_mode():
            positions = torch.arange(max_model_len, device=self.embedding.device)[None]
            cos, sin = model.model.rotary_emb(self.embedding[:1], positions)
        self.rotary = Rotary(cos[0], sin[0], attention.scaling)
        self._compiled = CompiledForward.of(
            self.layers, self.embedding, self.rotary, self.norm, self.head, self.num_heads,
            self.num_kv_heads,
        )  # fmt: skip
        self.fewest_rows = 4 if self._compiled is None else 1
        self.feature_layers: tuple[int, ...] = ()
        """Layers whose inputs a draft head wants to see, ascending."""
        self.features: torch.Tensor | None = None
        """Those of the last forward, [padded rows, layers * hidden]."""

    @torch.inference_mode()
    def forward(self, rows: Rows, attention: Attention) -> torch.Tensor:
        if self._compiled is not None and isinstance(attention, PathAttention):
            logits, self.features = self._compiled.forward(rows, attention, self.feature_layers)
            return logits
        hidden = self.embedding.index_select(0, rows.token_ids)
        x, self.features = self._layer_by_layer(hidden, self.rotary.at(rows.positions), attention)
        return self.head(x.index_select(0, rows.logit_rows))

    def _layer_by_layer(
        self, hidden: torch.Tensor, angles: Angles, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads, kv_heads, size = self.num_heads, self.num_kv_heads, self.head_size
        stream = ResidualStream(hidden)
        x = stream.norm(self.layers[0].input_norm)
        # Each layer leaves the norm that the next one reads; the last one that of the head.
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        seen = []
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            if index in self.feature_layers:
                seen.append(stream.copy())
            qkv = layer.qkv(x).view(len(x), heads + 2 * kv_heads, size)
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm.of_heads(qkv[:, :heads])
                layer.k_norm.of_heads(qkv[:, heads:-kv_heads])
            self.rotary.rotate(qkv, heads, kv_heads, angles)
            x = attention.attend(index, qkv, window=layer.window)
            x = stream.add(layer.output(x), layer.post_norm)
            x = stream.add(layer.down(gated(layer.gate_up(x))), next_norm)
        return x, torch.cat(seen, dim=-1) if seen else None


def _pack_layer(layer: Any, config: Any, group: RankGroup | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    return Layer(
        input_norm=RmsNorm(layer.input_layernorm.weight, config.rms_norm_eps),
        qkv=fused(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=_head_norm(attention, "q_norm", config.rms_norm_eps),
        k_norm=_head_norm(attention, "k_norm", config.rms_norm_eps),
        output=_over_ranks(fused(attention.o_proj), group),
        post_norm=RmsNorm(layer.post_attention_layernorm.weight, config.rms_norm_eps),
        gate_up=fused(mlp.gate_proj, mlp.up_proj),
        down=_over_ranks(fused(mlp.down_proj), group),
        window=window,
    )


def _over_ranks(linear: Linear, group: RankGroup | None) -> Linear:
    return linear if group is None else RowSplitLinear(linear, group)


def _head_norm(attention: Any, name: str, eps: float) -> RmsNorm | None:
    norm = getattr(attention, name, None)
    return None if norm is None else RmsNorm(norm.weight, eps)


_IMPLEMENTATION = "valuspec"


class TransformersDecoder:
    """Any other decoder-only architecture, through transformers' attention-interface registry."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.fewest_rows = 4
        _pack_linears(model)
        self._attention: Attention | None = None
        self._layers_seen = 0
        # One registry entry per instance: the function finds its forward through the closure.
        name = f"{_IMPLEMENTATION}_{id(self)}"
        AttentionInterface.register(name, self._attend)
        model.config._attn_implementation = name

    @torch.inference_mode()
    def forward(self, rows: Rows, attention: Attention) -> torch.Tensor:
        self._attention = attention
        self._layers_seen = 0
        logits: torch.Tensor = self.model(
            input_ids=rows.token_ids[None],
            position_ids=rows.positions[None],
            use_cache=False,
            logits_to_keep=rows.logit_rows,
        ).logits
        if self._layers_seen != attention.cache.num_layers:
            raise ModelError(
                f"{self._layers_seen} of {attention.cache.num_layers} layers of this "
                f"{self.model.config.model_type} model use transformers' attention interface; "
                "the architecture is not supported"
            )
        return logits[0]

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Called by transformers with query, key, value [1, heads, padded rows, head size]."""
        if self._attention is None:
            raise ModelError("attention called outside a forward")
        if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
            raise ModelError("attention sinks and position biases are not supported")
        self._layers_seen += 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = self._attention.attend(
            module.layer_idx,
            torch.cat((query[0] * scale, key[0], value[0])).transpose(0, 1).contiguous(),
            window=sliding_window,
            softcap=softcap,
        )
        return out.view(1, len(out), query.shape[1], query.shape[3]), None


def _pack_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module` by its packed counterpart."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, packed(child.weight, child.bias))
        else:
            _pack_linears(child)
