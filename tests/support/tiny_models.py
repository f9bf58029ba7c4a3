"""Small random models of every family, made on the spot, and a tokenizer of single bytes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from valuspec.engine.target import Target

VOCAB = 320
EOS = 257
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "initializer_range": 0.2,
}
_GPT2_SIZES = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "initializer_range": 0.2,
}
#: name -> (configuration class, sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES | {"rms_norm_eps": 1e-5}),
    "llama_bias": ("LlamaConfig", _SIZES | {"attention_bias": True, "tie_word_embeddings": True}),
    "llama_head_dim": ("LlamaConfig", _SIZES | {"head_dim": 24}),
    "mistral": ("MistralConfig", _SIZES | {"sliding_window": None}),
    "mistral_window": ("MistralConfig", _SIZES | {"sliding_window": 21}),
    "mistral_narrow_window": ("MistralConfig", _SIZES | {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", dict(_SIZES)),
    "qwen2_window": (
        "Qwen2Config",
        _SIZES | {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", _SIZES | {"head_dim": 16}),
    "gpt2": ("GPT2Config", _GPT2_SIZES),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _SIZES.items() if "key_value" not in k}),
    "gemma": ("GemmaConfig", _SIZES | {"head_dim": 16, "tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2Config",
        _SIZES
        | {
            "head_dim": 16,
            "sliding_window": 25,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "phi": ("PhiConfig", dict(_SIZES)),
    "olmo2": ("Olmo2Config", dict(_SIZES)),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
}
LEAN = tuple(n for n in FAMILIES if n.startswith(("llama", "mistral", "qwen")))


def tiny_model(family: str, *, seed: int = 0, **sizes: Any) -> Any:
    """A random transformers model in fp32; biases and norms are random as well."""
    class_name, defaults = FAMILIES[family]
    config = getattr(transformers, class_name)(**(defaults | sizes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # transformers starts them at 0 and 1, which hides mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if name.endswith(("lm_head.weight", "embed_out.weight")):
                parameter.mul_(2)
    return model.eval()


def tiny_target(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Target:
    """The same model as `tiny_model`, wrapped, with the byte tokenizer."""
    return wrap(tiny_model(family, seed=seed, **sizes), dtype)


def wrap(model: Any, dtype: torch.dtype = torch.float32) -> Target:
    """A target of a copy of `model`: wrapping repacks the modules."""
    target = Target.from_model(copy.deepcopy(model).to(dtype), byte_tokenizer())
    target.eos_token_ids = frozenset({EOS})
    return target


def byte_tokenizer() -> Any:
    """Token i < 256 is one byte; a few merged tokens; 256 and 257 begin and end a text."""
    letters = _byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    vocabulary |= {"<s>": 256, "</s>": EOS}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
