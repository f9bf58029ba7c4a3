"""Small random draft heads, and a slow way to say what one predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.support.tiny_models import VOCAB
from valuspec.eagle3.config import HeadConfig
from valuspec.eagle3.head import DraftHead
from valuspec.engine.target import Target


def head_config(**changes: Any) -> HeadConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
        "num_kv_heads": 2, "head_size": 8, "vocab_size": 60, "draft_vocab_size": 24,
        "layer_ids": (1, 2, 3), "rope": {"rope_theta": 10000.0},
    }  # fmt: skip
    return HeadConfig(**(sizes | changes))


def random_head(seed: int, **changes: Any) -> DraftHead:
    """In fp32; its draft vocabulary is a random choice of the target's."""
    config = head_config(**changes)
    torch.manual_seed(seed)
    head = DraftHead(config, torch.randn(config.vocab_size, config.hidden_size))
    with torch.no_grad():
        for parameter in head.parameters():
            spread = 0.1 if parameter.dim() == 1 else 1.5 / math.sqrt(parameter.shape[1])
            parameter.add_(torch.randn_like(parameter), alpha=spread)
        known = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        head.d2t.copy_(known - torch.arange(config.draft_vocab_size))
    return head.eval()


def head_for(target: Target, seed: int = 0) -> DraftHead:
    """For a tiny target of four layers; its vocabulary is the target's, so that it is right now
    and then."""
    head = random_head(
        seed, hidden_size=64, target_hidden_size=64, vocab_size=VOCAB, draft_vocab_size=VOCAB
    )
    head.embedding = target._lean().embedding
    with torch.no_grad():
        head.d2t.zero_()
    return head


def slow_log_p(
    head: DraftHead, features: torch.Tensor, tokens: Sequence[int], path: Sequence[int]
) -> torch.Tensor:
    """Log probabilities [draft vocabulary] of what follows `path`, in fp64, nothing kept.

    features: [n, 3 * hidden] at positions 0 to n - 1; tokens: the token after each
    """
    w = {name: tensor.double() for name, tensor in head.state_dict().items()}
    config, keys, values = head.config, [], []
    groups = config.num_heads // config.num_kv_heads
    hidden = torch.zeros(0)
    for position, token in enumerate([*tokens, *path]):
        if position < len(tokens):
            hidden = features[position].double()
            if config.norm_before_fc:
                hidden = _norm(hidden, w["input_norm.weight"])
            hidden = w["fc.weight"] @ hidden
        normed = _norm(hidden, w["midlayer.hidden_norm.weight"])
        embedded = _norm(head.embedding[token].double(), w["midlayer.input_layernorm.weight"])
        x = torch.cat([embedded, normed])

        def heads(kind: str, x: torch.Tensor = x, position: int = position) -> torch.Tensor:
            y = w[f"midlayer.self_attn.{kind}_proj.weight"] @ x
            if config.attention_bias:
                y = y + w[f"midlayer.self_attn.{kind}_proj.bias"]
            y = y.view(-1, config.head_size)
            if config.qk_norm and kind != "v":
                y = _norm(y, w[f"midlayer.self_attn.{kind}_norm.weight"])
            return y if kind == "v" else _turned(y, position, config)

        keys.append(heads("k"))
        values.append(heads("v"))
        attended = []
        for index, query in enumerate(heads("q")):
            kv = index // groups
            scores = torch.stack([query @ key[kv] for key in keys]) / math.sqrt(config.head_size)
            weights = scores.softmax(0)
            attended.append(sum(a * value[kv] for a, value in zip(weights, values, strict=True)))
        residual = normed if config.norm_before_residual else hidden
        hidden = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
        x = _norm(hidden, w["midlayer.post_attention_layernorm.weight"])
        gate = w["midlayer.mlp.gate_proj.weight"] @ x
        up = w["midlayer.mlp.up_proj.weight"] @ x
        hidden = hidden + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        final = _norm(hidden, w["norm.weight"])
        if config.norm_output:
            hidden = final
    return (w["lm_head.weight"] @ final).log_softmax(0)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _turned(x: torch.Tensor, position: int, config: HeadConfig) -> torch.Tensor:
    half = config.head_size // 2
    angle = position / config.rope["rope_theta"] ** (torch.arange(half).double() / half)
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half).double(), angle)
    return torch.cat([pairs.real, pairs.imag], dim=-1)
