"""A target without a model: its cache holds token ids, and what it reads there decides.

The next token is a weighted sum of every token of the context, as read from the cache through the
block tables. A block given to two sequences, freed too early, shared with another context or not
moved on commit therefore changes the output, which is known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine.kv_cache import Int64Array, KvCache
from valuspec.engine.rows import NEAR, SequenceRows

MAX_MODEL_LEN = 1024
_WEIGHTS = np.random.default_rng(0).integers(1, 1 << 30, MAX_MODEL_LEN)


class LedgerTarget:
    """What the engine needs of `valuspec.engine.target.Target`.

    envelope: rows of a forward where all must fit one width; None where any number may be computed
    """

    vocab_size = 97
    max_model_len = MAX_MODEL_LEN
    max_tree_depth = NEAR - 1
    eos_token_ids = frozenset({96})
    model_fingerprint = "ledger"
    tokenizer = None

    def __init__(self, envelope: int | None = None) -> None:
        self.exact_mode = "rows" if envelope is None else "envelope"
        self.min_width = envelope or 4

    def affordable_tokens(self, wanted: int) -> int:
        return wanted

    def new_cache(self, tables: Int64Array, num_blocks: int) -> KvCache:
        """A key is one number: the token's id."""
        return KvCache(
            num_layers=1,
            num_blocks=num_blocks,
            num_heads=1,
            num_kv_heads=1,
            head_size=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            tables=tables,
        )

    def forward(
        self, members: list[SequenceRows], cache: KvCache, logit_rows: NDArray[np.int64]
    ) -> torch.Tensor:
        stored = cache.keys.numpy().reshape(-1)
        sums = []
        for rows in members:
            here = np.array(rows.sequence)
            stored[cache.cells(here, rows.start + np.arange(len(rows)))] = rows.token_ids
        for rows in members:
            context = stored[cache.cells(np.array(rows.sequence), np.arange(rows.start))]
            sums.append(_sums(weighted(context.astype(np.int64)), rows))
        logits = torch.zeros(len(logit_rows), self.vocab_size)
        chosen = np.concatenate(sums)[logit_rows] % self.vocab_size
        logits[np.arange(len(chosen)), chosen] = 1
        return logits

    def wait(self) -> None:
        return


def weighted(token_ids: NDArray[np.int64]) -> int:
    return int(token_ids @ _WEIGHTS[: len(token_ids)])


def _sums(context: int, rows: SequenceRows) -> NDArray[np.int64]:
    """Weighted sum of each row's context and path."""
    if rows.is_chain:
        own = rows.token_ids * _WEIGHTS[rows.start : rows.start + len(rows)]
        return context + np.cumsum(own)
    sums: list[int] = []
    depths: list[int] = []
    for token, parent in zip(rows.token_ids.tolist(), rows.parents.tolist(), strict=True):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        before = sums[parent] if parent >= 0 else context
        sums.append(before + token * int(_WEIGHTS[rows.start + depths[-1]]))
    return np.array(sums)


def continuation(prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """What any engine must answer over this target."""
    output: list[int] = []
    total = weighted(np.array(prompt_ids))
    for position in range(len(prompt_ids), len(prompt_ids) + max_tokens):
        token = total % LedgerTarget.vocab_size
        output.append(token)
        if token in LedgerTarget.eos_token_ids:
            break
        total += token * int(_WEIGHTS[position])
    return output
