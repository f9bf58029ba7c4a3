"""Embed a request without a model: which tokens it is made of, rare ones first.

Feature hashing (Weinberger et al., 2009) of the prompt's tokens with log term frequency. BPE
vocabularies are numbered in merge order, so a token's id grows with its rarity: log(id) serves as
the inverse document frequency that no corpus has to be counted for. What it cannot know, the
template all prompts of one namespace share, is subtracted at search time (see service.py).
docs/retrieval.md has the alternatives and their recall.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EMBEDDING_DIM = 512
EMBEDDING_VERSION = 1  # raise it when `embed` changes: old vectors become unreachable


def embed(prompt_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the unit vector float32 [EMBEDDING_DIM] of a prompt's token ids.

    Equal on every machine. Raises ValueError for an empty prompt or a negative id.
    """
    ids = np.asarray(prompt_ids, np.int64)
    if len(ids) == 0 or ids.min() < 0:
        raise ValueError("cannot embed an empty prompt or negative token ids")
    tokens, counts = np.unique(ids, return_counts=True)
    weights = (1.0 + np.log(counts)) * np.log(2.0 + tokens)
    hashes = _mix(tokens.astype(np.uint64))
    # A sign from a bit the bucket does not use: colliding tokens cancel on average.
    signs = 1.0 - 2.0 * (hashes >> np.uint64(63)).astype(np.float64)
    buckets = (hashes % np.uint64(EMBEDDING_DIM)).astype(np.int64)
    vector = np.bincount(buckets, weights * signs, EMBEDDING_DIM)
    norm = float(np.linalg.norm(vector))
    if norm == 0.0:  # every token met its opposite
        vector[0] = norm = 1.0
    return (vector / norm).astype(np.float32)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64: spread every input bit over all 64 output bits (wraps around on purpose)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
