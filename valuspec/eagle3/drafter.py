"""A draft head at work: its keys and values, and the trees of a whole batch at once.

Keys and values lie in the blocks the target's cache uses, under the same tables. So requests that
share a prompt's blocks share what the head knows of it, and nothing is to be freed. Nodes of a tree
that grows have blocks of their own behind those, which nobody shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.drafting.eagle3 import HeadDraft
from valuspec.eagle3.compiled_head import CompiledHead
from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.plain_head import PlainHead
from valuspec.eagle3.tree import Growth, Likeliest, TreeShape
from valuspec.engine.kv_cache import BLOCK, Int64Array, KvCache
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.rows import NEAR, Rows, SequenceRows, build_rows
from valuspec.jit import kernel

_CPU = torch.device("cpu")


class Steps(Protocol):
    """The head's arithmetic. A step hands its hidden states on to the next one."""

    def catch_up(
        self, features: torch.Tensor, rows: Rows, known: PathAttention, ends: PathAttention
    ) -> Likeliest:
        """Take note of rows, and predict what follows some of them.

        features: of the target [num_rows, 3 * hidden]
        rows:     the tokens after them; `logit_rows` are those to predict from
        known:    attention of all rows, ends: of those to predict from
        """
        ...

    def expand(self, parents: Int64Array, rows: Rows, attention: PathAttention) -> Likeliest:
        """Predict what follows rows of a tree.

        parents: int64 [num_rows], rows that the step before predicted from
        """
        ...


class _Pairs(NamedTuple):
    """Features [n, 3 * hidden] at consecutive positions, and the tokens [n] after each."""

    first: int
    features: torch.Tensor
    tokens: NDArray[np.int64]


class HeadDrafter:
    """Drafts for the sequences of one engine. Use from one thread.

    head:       in main memory, bf16 or fp32
    tables:     int64 [places, blocks of a sequence]; the engine's own, read at every draft
    num_blocks: blocks the tables may name
    """

    def __init__(
        self, head: DraftHead, tables: Int64Array, num_blocks: int, shape: TreeShape
    ) -> None:
        if shape.depth >= NEAR:
            raise ValueError(f"a tree may be expanded {NEAR - 1} times, not {shape.depth}")
        config = head.config
        self.shape = shape
        self._d2t = head.d2t.numpy()
        self._engine_tables = tables
        places, blocks_each = tables.shape
        self._first_own = blocks_each * BLOCK  # slot of the first node of a tree
        own_each = -(-max(1, shape.depth * shape.top_k) // BLOCK)
        own = num_blocks + np.arange(places * own_each).reshape(places, own_each)
        self._cache = KvCache(
            num_layers=1, num_blocks=num_blocks + own.size,
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
            head_size=config.head_size, dtype=head.embedding.dtype, device=_CPU,
            tables=np.concatenate([tables, own], axis=1),
        )  # fmt: skip
        top_k = min(shape.top_k, config.draft_vocab_size)
        if CompiledHead.takes(head):
            positions = self._first_own + NEAR
            most = places * top_k
            self._steps: Steps = CompiledHead(head, self._cache, top_k, positions, most)
        else:
            self._steps = PlainHead(head, top_k)
        self._every = np.arange(places * top_k)
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
        for kept in (self._cache.keys, self._cache.values):
            kept[:, target] = kept[:, source]

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
        self._cache.tables[:, : self._engine_tables.shape[1]] = self._engine_tables
        depth = min(self.shape.depth, max(max_depths) - 1)
        shape = TreeShape(self.shape.top_k, depth, self.shape.total_tokens)
        growth = Growth(len(places), shape, self._d2t)
        likeliest, lengths = self._catch_up(places)
        near = np.zeros((len(places), NEAR), np.int64)
        for level in range(depth):
            tokens, parents = growth.add(likeliest)
            rows = self._level(level, places, lengths, tokens, near[parents])
            attention = PathAttention(rows, self._cache)
            likeliest = self._steps.expand(parents, rows, attention)
            near = rows.near
        growth.add(likeliest)
        return growth.drafts(max_depths)

    def _catch_up(self, places: Sequence[int]) -> tuple[Likeliest, Int64Array]:
        """Take note of the waiting pairs; (what follows each sequence, positions known of it)."""
        waiting = [self._waiting.pop(place) for place in places]
        features = [pair.features for pairs in waiting for pair in pairs]
        members = [
            SequenceRows.chain(place, pairs[0].first, np.concatenate([p.tokens for p in pairs]))
            for place, pairs in zip(places, waiting, strict=True)
        ]
        last = np.cumsum([len(member) for member in members]) - 1
        rows = build_rows(members, last, _CPU, min_width=1)
        lengths = rows.lengths[last]
        ends = build_rows(
            [
                SequenceRows.chain(member.sequence, length - 1, member.token_ids[-1:])
                for member, length in zip(members, lengths.tolist(), strict=True)
            ],
            np.arange(len(members)), _CPU, min_width=1,
        )  # fmt: skip
        likeliest = self._steps.catch_up(
            features[0] if len(features) == 1 else torch.cat(features), rows,
            PathAttention(rows, self._cache), PathAttention(ends, self._cache),
        )  # fmt: skip
        return likeliest, lengths

    def _level(
        self, level: int, places: Sequence[int], lengths: Int64Array, tokens: Int64Array,
        near: Int64Array,
    ) -> Rows:  # fmt: skip
        """Rows of the trees' nodes to expand, as many of each tree.

        near: int64 [num_rows, NEAR], what their parents attend to (taken over)
        """
        of_rows = np.empty((6, len(tokens)), np.int64)
        where = np.array([places, lengths])
        _lay_out(where, level, self._first_own, near, of_rows)
        return Rows(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(of_rows[0]),
            logit_rows=torch.from_numpy(self._every[: len(tokens)]),
            members=(), min_width=1, slots=of_rows[1], paths=of_rows[2:], near=near,
            counts=np.full(len(places), len(tokens) // len(places)),
        )  # fmt: skip


@kernel
def _lay_out(
    where: Int64Array, level: int, first_own: int, near: Int64Array, of_rows: Int64Array
) -> None:
    """Fill what `Rows` says of nodes to expand, whose parents' near slots are given.

    where: places and lengths, [2, requests]; of_rows: see `valuspec.engine.rows`
    """
    positions, slots, sequences, starts, lowest, lengths = of_rows
    each = len(slots) // where.shape[1]
    for row in range(len(slots)):
        place, known = where[:, row // each]
        positions[row], sequences[row] = known + level, place
        slots[row] = first_own + level * each + row % each
        starts[row], lowest[row], lengths[row] = known, 0, known + level + 1
        near[row, :-1] = near[row, 1:]
        near[row, -1] = slots[row]
