"""A draft head's steps in torch operations, for what has no compiled loops."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.tree import Likeliest
from valuspec.engine.linear import packed
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.rows import Rows


class PlainHead:
    """See `valuspec.eagle3.drafter.Steps`.

    head: repacked for few rows; it can draft from then on and nothing else
    """

    def __init__(self, head: DraftHead, top_k: int) -> None:
        self._head = _packed(head)
        self._top_k = top_k
        self._handed_on = torch.empty(0)

    def catch_up(
        self, features: torch.Tensor, rows: Rows, known: PathAttention, ends: PathAttention
    ) -> Likeliest:
        """See `Steps`."""
        return self._step(self._head.fuse(features), rows, known, ends)

    def expand(self, parents: NDArray[np.int64], rows: Rows, attention: PathAttention) -> Likeliest:
        """See `Steps`."""
        return self._step(self._handed_on[torch.from_numpy(parents)], rows, attention, attention)

    def _step(
        self, hidden: torch.Tensor, rows: Rows, known: PathAttention, ends: PathAttention
    ) -> Likeliest:
        head, picked = self._head, rows.logit_rows
        projected = head.project(rows.token_ids, hidden, rows.positions)
        qkv = torch.cat([projected.query, projected.key, projected.value], dim=1)
        known.store(0, qkv)
        attended = ends.attend(0, qkv[picked])
        logits, self._handed_on = head.logits(head.finish(projected.residual[picked], attended))
        top = logits.float().log_softmax(-1).topk(self._top_k)
        return top.indices.numpy(), top.values.numpy()


def _packed(head: DraftHead) -> DraftHead:
    """The head with its linear layers packed, for few rows at a time."""
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, packed(child.weight, child.bias))
    return head.requires_grad_(False)
