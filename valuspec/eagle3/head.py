"""The draft head: fused features of the target, one decoder layer, a reduced vocabulary.

A row pairs the target's feature at position t with the token at t + 1, and predicts the token at
t + 2. Further ahead there is no feature yet, so the head's own hidden state stands in for it.
Weights have the names of the authors' checkpoints.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from valuspec.eagle3.config import HeadConfig

#: Positions the rotary table is laid out for at first; it grows.
POSITIONS = 4096


class Projected(NamedTuple):
    """A row on its way into attention.

    residual: [num_rows, hidden]; query: [num_rows, heads, size], scaled
    key, value: [num_rows, kv heads, size]
    """

    residual: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class DraftHead(nn.Module):
    """All but attention works on rows; `valuspec.eagle3.drafter` and `.training` attend."""

    def __init__(self, config: HeadConfig, embedding: torch.Tensor) -> None:
        """embedding: the target's, [vocabulary, hidden]; shared, not trained and not stored."""
        super().__init__()
        self.config = config
        self.embedding = embedding.detach()
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = _norm(3 * config.target_hidden_size, config)
        self.midlayer = _Layer(config)
        self.norm = _norm(config.hidden_size, config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.d2t: torch.Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self._angles = _angles(config, POSITIONS)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_rows, hidden] of the target's features [num_rows, 3 * hidden]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        fused: torch.Tensor = self.fc(features)
        return fused

    def project(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> Projected:
        """Rows of the token ids [num_rows] that follow the hidden states [num_rows, hidden]."""
        config, layer = self.config, self.midlayer
        normed = layer.hidden_norm(hidden)
        embedded = self.embedding.index_select(0, token_ids).to(normed.dtype)
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        query, key, value = layer.self_attn.project(x)
        if config.qk_norm:
            query, key = layer.self_attn.q_norm(query), layer.self_attn.k_norm(key)
        angles = self._at(positions)
        residual = normed if config.norm_before_residual else hidden
        scaled = _rotate(query, angles) * config.head_size**-0.5
        return Projected(residual, scaled, _rotate(key, angles), value)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_rows, hidden] after attention gave [num_rows, heads * size]."""
        layer = self.midlayer
        hidden: torch.Tensor = residual + layer.self_attn.o_proj(attended)
        return torch.add(hidden, layer.mlp(layer.post_attention_layernorm(hidden)))

    def logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [num_rows, draft vocabulary], what the next step takes for a feature)."""
        normed = self.norm(hidden)
        return self.lm_head(normed), normed if self.config.norm_output else hidden

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of the target's vocabulary; `d2t` holds the differences."""
        token_ids: torch.Tensor = draft_ids + self.d2t[draft_ids]
        return token_ids

    def angles(self, num_positions: int) -> torch.Tensor:
        """Cosine and sine by position, float32 [num_positions, 2, head size / 2]."""
        return _angles(self.config, num_positions)

    def _at(self, positions: torch.Tensor) -> torch.Tensor:
        if len(positions) and int(positions.max()) >= len(self._angles):
            self._angles = _angles(self.config, 2 * (int(positions.max()) + 1))
        return self._angles.to(positions.device)[positions]


class _Layer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.hidden_norm = _norm(config.hidden_size, config)
        self.input_layernorm = _norm(config.hidden_size, config)
        self.post_attention_layernorm = _norm(config.hidden_size, config)


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._size = config.head_size
        bias, width = config.attention_bias, 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_size, bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_size, bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_size, bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias)
        if config.qk_norm:
            self.q_norm = _norm(config.head_size, config)
            self.k_norm = _norm(config.head_size, config)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, [num_rows, heads, size] each."""
        shape = (len(x), -1, self._size)
        return self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def _norm(size: int, config: HeadConfig) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=config.rms_norm_eps)


def _angles(config: HeadConfig, num_positions: int) -> torch.Tensor:
    """Cosine and sine by position, float32 [num_positions, 2, head size / 2]."""
    rope = config.rope
    exponents = torch.arange(0, config.head_size, 2).float() / config.head_size
    frequency = 1.0 / rope["rope_theta"] ** exponents
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        frequency = frequency / rope["factor"]
    elif kind == "llama3":
        # Long waves are stretched, short ones stay, and in between the two are blended.
        original = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original * frequency / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = blend * frequency + (1 - blend) * frequency / rope["factor"]
    angle = torch.outer(torch.arange(num_positions).float(), frequency)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [num_rows, heads, size], first half against second, by angles [num_rows, 2, size / 2]."""
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
