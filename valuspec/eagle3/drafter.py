"""A draft head at work: its keys and values, and the trees of a whole batch at once.

Keys and values lie in the blocks the target's cache uses, under the same tables. So requests that
share a prompt's blocks share what the head knows of it, and nothing is to be freed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from valuspec.drafting.eagle3 import HeadDraft
from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.tree import TreeShape, grow
from valuspec.engine.bits import aligned_zeros
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.linear import packed


class _Pairs(NamedTuple):
    """Features [n, 3 * hidden] at consecutive positions, and the tokens [n] after each."""

    first: int
    features: torch.Tensor
    tokens: NDArray[np.int64]


class HeadDrafter:
    """Drafts for the sequences of one engine. Use from one thread.

    head:       repacked for few rows; it can draft from then on and nothing else
    tables:     int64 [places, blocks of a sequence]; the engine's own, read at every draft
    num_blocks: blocks the tables may name
    """

    def __init__(
        self, head: DraftHead, tables: NDArray[np.int64], num_blocks: int, shape: TreeShape
    ) -> None:
        self.shape = shape
        self._head = _packed(head)
        self._tables = tables
        config = head.config
        dtype = head.embedding.dtype
        kept = (num_blocks, BLOCK, config.num_kv_heads, config.head_size)
        self._keys = _lazy_zeros(kept, dtype)
        self._values = _lazy_zeros(kept, dtype)
        self._waiting: dict[int, list[_Pairs]] = {}

    def observe(
        self, place: int, first: int, features: torch.Tensor, tokens: NDArray[np.int64]
    ) -> None:
        """Take note of target features [n, 3 * hidden] at positions from `first` on.

        tokens: int64 [n], the token after each. They are looked at when a draft is wanted.
        """
        self._waiting.setdefault(place, []).append(_Pairs(first, features, tokens))

    def copy(self, source: int, target: int) -> None:
        """Copy what is known of a block's tokens to another block."""
        self._keys[target] = self._keys[source]
        self._values[target] = self._values[source]

    def forget(self, place: int) -> None:
        """Another sequence will have this place."""
        self._waiting.pop(place, None)

    def ready(self, place: int) -> bool:
        """Whether the sequence at this place has been observed since its last draft."""
        return place in self._waiting

    @torch.inference_mode()
    def draft(self, places: Sequence[int], max_depths: Sequence[int]) -> list[HeadDraft]:
        """Trees of the sequences at `places`; each must be ready.

        max_depths: most levels of each tree, at least 1
        """
        head = self._head
        hidden, lengths = self._catch_up(places)
        context = _Context(*self._gather(places, lengths), torch.from_numpy(lengths))
        first, feature = head.logits(hidden)
        growth = _Growth(head, context, feature)
        depth = min(self.shape.depth, max(max_depths) - 1)
        shape = TreeShape(self.shape.top_k, depth, self.shape.total_tokens)
        drafts = grow(first.float().log_softmax(-1), growth.expand, head.token_ids, shape)
        return [_cut(draft, most) for draft, most in zip(drafts, max_depths, strict=True)]

    def _catch_up(self, places: Sequence[int]) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Write the waiting pairs; (hidden state after each sequence's last, positions known)."""
        head = self._head
        pairs = [p for place in places for p in self._waiting[place]]
        owners = np.repeat(places, [sum(len(p.tokens) for p in self._waiting[q]) for q in places])
        positions = np.concatenate([p.first + np.arange(len(p.tokens)) for p in pairs])
        last = np.flatnonzero(np.append(owners[1:] != owners[:-1], True))
        rows = head.project(
            torch.from_numpy(np.concatenate([p.tokens for p in pairs])),
            head.fuse(torch.cat([p.features for p in pairs])),
            torch.from_numpy(positions),
        )
        cells = self._tables[owners, positions // BLOCK] * BLOCK + positions % BLOCK
        self._keys.view(-1, *rows.key.shape[1:])[cells] = rows.key
        self._values.view(-1, *rows.value.shape[1:])[cells] = rows.value
        for place in places:
            del self._waiting[place]
        lengths = positions[last] + 1
        context = _Context(*self._gather(places, lengths), torch.from_numpy(lengths))
        picked = torch.from_numpy(last)
        attended = context.attend(rows.query[picked][:, None], [], None)
        return head.finish(rows.residual[picked], attended.flatten(0, 1)), lengths

    def _gather(
        self, places: Sequence[int], lengths: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [requests, longest, kv heads, size] of the blocks in use."""
        blocks = torch.from_numpy(self._tables[places, : -(-int(lengths.max()) // BLOCK)])
        return self._keys[blocks].flatten(1, 2), self._values[blocks].flatten(1, 2)


class _Context:
    """Keys and values of the sequences' own tokens, and attention to them.

    keys, values: [requests, longest, kv heads, size]; lengths: int64 [requests]
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
        self.lengths = lengths
        self._keys = keys.permute(0, 2, 3, 1)
        self._values = values.transpose(1, 2)
        self._beyond = torch.arange(keys.shape[1]) >= lengths[:, None, None, None]

    def attend(
        self,
        query: torch.Tensor,
        tree: Sequence[tuple[torch.Tensor, torch.Tensor]],
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """[requests, nodes, heads, size] for queries of the same shape.

        tree:    keys and values of tree nodes, [requests, some nodes, kv heads, size] each
        visible: bool [requests, nodes, all those tree nodes], who attends to whom
        """
        requests, nodes, heads, size = query.shape
        kv_heads = self._keys.shape[1]
        groups = heads // kv_heads
        grouped = query.view(requests, nodes, kv_heads, groups, size).transpose(1, 2).flatten(2, 3)
        scores = (grouped @ self._keys).float().masked_fill(self._beyond, -torch.inf)
        if visible is not None:
            keys = torch.cat([key for key, _ in tree], dim=1).permute(0, 2, 3, 1)
            hidden = ~visible[:, None].repeat_interleave(groups, dim=2)
            own = (grouped @ keys).float().masked_fill(hidden, -torch.inf)
            scores = torch.cat([scores, own], dim=-1)
        weights = scores.softmax(-1).to(query.dtype)
        width = self._keys.shape[-1]
        out = weights[..., :width] @ self._values
        if visible is not None:
            values = torch.cat([value for _, value in tree], dim=1).transpose(1, 2)
            out = out + weights[..., width:] @ values
        return out.view(requests, kv_heads, nodes, groups, size).transpose(1, 2).flatten(2, 3)


class _Growth:
    """The state of trees between two levels.

    feature: [requests, hidden], what the context's last row hands on
    """

    def __init__(self, head: DraftHead, context: _Context, feature: torch.Tensor) -> None:
        self._head = head
        self._context = context
        self._features = feature[:, None]
        self._tree: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._visible = torch.zeros(len(feature), 1, 0, dtype=torch.bool)

    def expand(self, draft_ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """See `valuspec.eagle3.tree.Expand`."""
        head, (requests, nodes) = self._head, draft_ids.shape
        positions = self._context.lengths[:, None] + len(self._tree)
        feature = _taken(self._features, parents)
        rows = head.project(
            head.token_ids(draft_ids).flatten(),
            feature.flatten(0, 1),
            positions.expand(requests, nodes).flatten(),
        )
        query, key, value = (t.view(requests, nodes, *t.shape[1:]) for t in rows[1:])
        self._tree.append((key, value))
        itself = torch.eye(nodes, dtype=torch.bool).expand(requests, nodes, nodes)
        self._visible = torch.cat([_taken(self._visible, parents), itself], dim=2)
        attended = self._context.attend(query, self._tree, self._visible)
        hidden = head.finish(rows.residual, attended.flatten(0, 1))
        logits, handed_on = head.logits(hidden)
        self._features = handed_on.view(requests, nodes, -1)
        return logits.float().log_softmax(-1).view(requests, nodes, -1)


def _taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows [requests, n, size] at index [requests, m] -> [requests, m, size]."""
    return rows.gather(1, index[..., None].expand(*index.shape, rows.shape[2]))


def _cut(draft: HeadDraft, max_depth: int) -> HeadDraft:
    shallow = np.flatnonzero(draft.tree.depths() <= max_depth)
    return HeadDraft(draft.tree.select(shallow), draft.probability[shallow], draft.rank[shallow])


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory is used where something is written."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(aligned_zeros((size,), np.uint8)).view(dtype).view(shape)


def _packed(head: DraftHead) -> DraftHead:
    """The head with its linear layers packed, for few rows at a time."""
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, packed(child.weight, child.bias))
    return head.requires_grad_(False)
