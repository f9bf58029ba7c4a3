"""Which part of a model's weights each rank holds, by transformers' tensor-parallel plan.

Split by columns (outputs): queries, keys and values, so that a rank has whole heads with their
cache, and the MLP's gate and up. Split by rows (inputs): the attention's output and the MLP's down,
whose results are partial and summed over ranks. Embedding and norms are on every rank; the head,
which nobody else needs, on rank 0.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from valuspec.engine.decoder import is_lean
from valuspec.errors import ModelError

_BY_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_BY_ROWS = {"o_proj", "down_proj"}


def check_split(config: Any, num_ranks: int) -> None:
    """Raise ModelError if a model of this configuration cannot be split among `num_ranks` ranks."""
    config = config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    names: dict[str, set[str]] = {"colwise": set(), "rowwise": set()}
    for pattern, rule in plan.items():
        names.setdefault(rule, set()).add(pattern.rpartition(".")[2])
    if not is_lean(config) or (names["colwise"], names["rowwise"]) != (_BY_COLUMNS, _BY_ROWS):
        raise ModelError(
            f"a {config.model_type} model cannot be split among ranks; architectures that can: "
            "Llama, Mistral, Qwen2, Qwen3. Set tensor_parallel_size to 1"
        )
    counts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "MLP columns": config.intermediate_size,
    }
    for what, count in counts.items():
        if count % num_ranks:
            fitting = [n for n in range(1, count + 1) if not any(c % n for c in counts.values())]
            raise ModelError(
                f"{count} {what} cannot be split among {num_ranks} ranks; "
                f"set tensor_parallel_size to {' or '.join(map(str, fitting))}"
            )


def take_shard(model: Any, rank: int, num_ranks: int) -> None:
    """Leave a loaded transformers model only what `rank` holds of it.

    Raises ModelError as `check_split` does, before anything is changed.
    """
    check_split(model.config, num_ranks)
    plan = model.config.get_text_config().base_model_tp_plan
    for name, module in model.base_model.named_modules():
        rule = next((rule for pattern, rule in plan.items() if fnmatchcase(name, pattern)), None)
        if rule == "colwise":
            module.weight = _part(module.weight, 0, rank, num_ranks)
            if module.bias is not None:
                module.bias = _part(module.bias, 0, rank, num_ranks)
        elif rule == "rowwise":
            module.weight = _part(module.weight, 1, rank, num_ranks)
            if rank > 0:  # a sum needs the bias once
                module.bias = None
    if rank > 0:
        # A parameter of its own: where the embedding is tied to it, that stays whole.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight[:0].detach(), requires_grad=False)
        if model.lm_head.bias is not None:
            model.lm_head.bias = nn.Parameter(model.lm_head.bias[:0].detach(), requires_grad=False)


def _part(whole: torch.Tensor, dim: int, rank: int, num_ranks: int) -> nn.Parameter:
    part = whole.detach().chunk(num_ranks, dim)[rank]
    return nn.Parameter(part.clone(), requires_grad=False)  # a view would keep the whole
