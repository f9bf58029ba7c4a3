"""Two-zone attention over the block cache; see `rows` for the rule and why it is exact.

Every reduction here is a matrix product of fixed inner size (head size, NEAR or BLOCK), or a
maximum, which does not round. Blocks are added one after the other in position order; a block that
a row may not see contributes exact zeros.
"""

from __future__ import annotations

import torch

from valuspec.engine.kv_cache import BLOCK, ONES, KvCache
from valuspec.engine.rows import NEAR, Group, Rows


class TwoZoneAttention:
    """Attention of one forward; `attend` is called once per layer, in order."""

    def __init__(self, rows: Rows, cache: KvCache) -> None:
        self.rows = rows
        self.cache = cache
        self._masks: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scores = [
            torch.empty(
                (g.num_blocks, g.count * cache.num_kv_heads, g.width * cache.group_size, BLOCK),
                dtype=cache.dtype,
                device=cache.device,
            )
            for g in rows.groups
        ]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Store the rows' keys and values, and return the attention output.

        query: [padded rows, heads, head size], already scaled
        key, value: [padded rows, kv heads, head size]
        window: sliding window of this layer; softcap: cap scores by `c * tanh(score / c)`
        Returns [padded rows, heads * head size].
        """
        rows, cache = self.rows, self.cache
        n = rows.num_rows
        cache.write(layer, rows.key_slots, rows.value_slots, key[:n], value[:n])
        outputs = []
        for index, group in enumerate(rows.groups):
            q = query if group.gather is None else query.index_select(0, group.gather)
            out = self._attend_group(index, group, layer, q, window, softcap)
            outputs.append(out if group.scatter is None else out.index_select(0, group.scatter))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_group(
        self,
        index: int,
        group: Group,
        layer: int,
        query: torch.Tensor,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        cache = self.cache
        count, width, size = group.count, group.width, cache.head_size
        heads, per_head = cache.num_kv_heads, cache.group_size
        q = query.view(count, width, heads, per_head, size).transpose(1, 2)
        q = q.reshape(count * heads, width * per_head, size)

        scores = self._scores[index]
        for block in range(group.num_blocks):
            keys = cache.key_block(layer, block, group.first, count)
            torch.bmm(q, keys, out=scores[block])
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        near = scores.view(-1).take(group.near_scores)
        far_mask, near_mask = self._mask(index, group, window)
        shape = (group.num_blocks, count, heads, width, per_head, BLOCK)
        scores.view(shape).add_(far_mask)
        near.add_(near_mask)
        near = near.view(count * heads, width * per_head, NEAR)

        peak = torch.maximum(scores.amax((0, 3)), near.amax(2)).unsqueeze_(2)
        far = scores.sub_(peak).exp_()
        near = near.sub_(peak).exp_()

        near_values = cache.layer_values[layer].index_select(0, group.near_values)
        near_out = torch.bmm(
            near.view(count * heads * width, per_head, NEAR),
            near_values.view(count * heads * width, NEAR, size + ONES),
        )
        total = near_out.float().view(count * heads, width * per_head, size + ONES)
        for block in range(group.num_blocks):
            total += torch.bmm(far[block], cache.value_block(layer, block, group.first, count))
        out = (total[..., :size] / total[..., size : size + 1]).to(cache.dtype)
        out = out.view(count, heads, width, per_head, size).transpose(1, 2)
        return out.reshape(count * width, heads * per_head * size)

    def _mask(
        self, index: int, group: Group, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks depend on the layer only through its window: build each once per forward."""
        found = self._masks.get((index, window))
        if found is None:
            found = self._masks[index, window] = group.masks(window, self.cache.dtype)
        return found
