"""Dynamic draft trees, as in EAGLE-2 and EAGLE-3 (arXiv 2406.16858).

Level by level, the `top_k` likeliest nodes are expanded by their `top_k` likeliest children; of all
nodes seen, those of highest path probability are kept. Several requests grow their trees together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.drafting.eagle3 import HeadDraft
from valuspec.tree import DraftTree

Expand = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(draft ids of a level's nodes, each one's parent among the nodes of the level before), int64
[requests, nodes] both -> log probabilities of what follows, [requests, nodes, draft vocabulary]."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Defaults are those of the authors' code.

    top_k:        nodes expanded per level, and children of each
    depth:        expansions; the tree has one level more
    total_tokens: nodes kept, the pending token included
    """

    top_k: int = 10
    depth: int = 7
    total_tokens: int = 60


def grow(
    first: torch.Tensor,
    expand: Expand,
    token_ids: Callable[[torch.Tensor], torch.Tensor],
    shape: TreeShape,
) -> list[HeadDraft]:
    """Draft trees of several requests.

    first:     log probabilities of the first level, [requests, draft vocabulary]
    token_ids: of draft ids
    """
    k = min(shape.top_k, first.shape[-1])
    top = first.topk(k)
    scores, frontier = top.values, top.indices
    parents = torch.zeros_like(frontier)  # the context
    # Of all nodes of a level, in order: draft id, log probability, its path's, parent, rank.
    levels = [[frontier, top.values, scores, parents - 1, _ranks(frontier)]]
    nodes = torch.arange(k).expand(len(first), k)  # the frontier, as numbered over all levels
    offset = k
    for _ in range(shape.depth):
        top = expand(frontier, parents).topk(k)
        paths = scores[..., None] + top.values
        owners = nodes[..., None].expand_as(paths)
        level = [top.indices, top.values, paths, owners, _ranks(top.indices)]
        levels.append([part.flatten(1) for part in level])
        best = paths.flatten(1).topk(k)
        scores, chosen = best.values, best.indices
        frontier = top.indices.flatten(1).gather(1, chosen)
        parents = chosen // k
        nodes = offset + chosen
        offset += k * k
    draft_ids, *others = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    every = [part.numpy() for part in (token_ids(draft_ids), *others)]
    size = shape.total_tokens - 1
    return [_best(*(part[request] for part in every), size=size) for request in range(len(first))]


def _ranks(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[-1]).expand_as(ids)


def _best(
    tokens: NDArray[np.int64],
    log_p: NDArray[np.float32],
    paths: NDArray[np.float32],
    parents: NDArray[np.int64],
    ranks: NDArray[np.int64],
    *,
    size: int,
) -> HeadDraft:
    """The `size` nodes of highest path probability."""
    # Stable: a parent comes first and is never less likely than its child, so it is kept as well.
    kept = np.sort(np.argsort(-paths, kind="stable")[:size])
    every = DraftTree(
        tokens.astype(np.int32), parents.astype(np.int32), np.ones(len(tokens), np.int32)
    )
    return HeadDraft(every.select(kept), np.exp(log_p[kept]), ranks[kept].astype(np.int32))
