"""Shape of an EAGLE-3 head, read from the config.json of any of the three published layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from valuspec.errors import ModelError

#: Options of newer checkpoints that change what a head computes and are not built here.
UNSUPPORTED = ("fc_norm", "sliding_window", "target_hidden_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes and switches of a head.

    layer_ids: the target's layers whose inputs are fused, low to high: id j is what layer j reads,
        which is what layer j - 1 wrote. The authors take 2, the middle and the third from the end.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope: Mapping[str, Any]
    """`rope_theta`, and `rope_type` with its factors where positions are scaled."""
    attention_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head, as in Qwen3."""
    norm_before_residual: bool = False
    """The residual stream begins with the normalised feature instead of the feature."""
    norm_before_fc: bool = False
    """The fused features are normalised before they are projected."""
    norm_output: bool = False
    """A step hands its normalised hidden state on to the next, instead of the hidden state."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any], num_target_layers: int) -> HeadConfig:
        """Read the authors' flat layout, SpecForge's, or the nested one of `speculators`.

        Raises ModelError for what is missing, or would compute something else.
        """
        layer = config.get("transformer_layer_config", config)
        for name in UNSUPPORTED:
            if config.get(name) or layer.get(name):
                raise ModelError(f"EAGLE-3 heads with {name} are not supported")
        if (count := layer.get("num_hidden_layers", 1)) != 1:
            raise ModelError(f"the head has {count} decoder layers; EAGLE-3 has one")
        try:
            hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
            vocab = int(layer["vocab_size"])
            return cls(
                hidden_size=hidden,
                target_hidden_size=int(config.get("target_hidden_size") or hidden),
                intermediate_size=int(layer["intermediate_size"]),
                num_heads=heads,
                num_kv_heads=int(layer.get("num_key_value_heads") or heads),
                head_size=int(layer.get("head_dim") or hidden // heads),
                vocab_size=vocab,
                draft_vocab_size=int(config.get("draft_vocab_size") or vocab),
                layer_ids=_layer_ids(config, num_target_layers),
                rms_norm_eps=float(layer.get("rms_norm_eps", 1e-5)),
                rope=_rope(layer),
                attention_bias=bool(layer.get("attention_bias", False)),
                qk_norm=layer.get("model_type") == "qwen3",
                norm_before_residual=bool(config.get("norm_before_residual", False)),
                norm_before_fc=bool(config.get("norm_before_fc", False)),
                norm_output=bool(config.get("norm_output", False)),
            )
        except KeyError as error:
            raise ModelError(f"the head's config.json does not say {error.args[0]}") from error
        except (TypeError, ValueError) as error:
            raise ModelError(f"sizes in the head's config.json: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The authors' flat layout, which the other two projects read as well."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope["rope_theta"],
            "rope_scaling": dict(self.rope) if "rope_type" in self.rope else None,
            "attention_bias": self.attention_bias,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "norm_output": self.norm_output,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layer_ids)},
        }


def default_layer_ids(num_target_layers: int) -> tuple[int, int, int]:
    """The authors' choice: low, middle, high."""
    return 2, num_target_layers // 2, num_target_layers - 3


def _layer_ids(config: Mapping[str, Any], num_target_layers: int) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    found = config.get(name) or config.get("eagle_config", {}).get(name)
    ids = tuple(int(i) for i in found or default_layer_ids(num_target_layers))
    if len(ids) != 3 or sorted(set(ids)) != list(ids):
        raise ModelError(f"the head reads layers {ids}; three, ascending, expected")
    return ids


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    if "type" in rope:  # the older name
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_theta", layer.get("rope_theta", 10000.0))
    if (kind := rope.get("rope_type", "default")) not in ("default", "linear", "llama3"):
        raise ModelError(f"EAGLE-3 heads with {kind} rotary positions are not supported")
    return rope
