"""One node budget for a whole batch.

A value is a probability, so values of different requests can be compared: the candidate nodes of
all running requests compete for the rows of the next forward. One stream may get twenty nodes; of
sixteen streams each gets one or two, or those that are sure of themselves get them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from valuspec.evidence import CandidateTree
from valuspec.thresholds import ThresholdSet
from valuspec.valuation import keep, values

IntArray = NDArray[np.int32]


def share_budget(
    candidates: Sequence[CandidateTree],
    thresholds: Sequence[ThresholdSet],
    *,
    batch_size: int,
    max_nodes: int,
) -> list[IntArray]:
    """Indices of the nodes worth verifying, by request: ascending and ancestor-closed.

    candidates: of the requests that have any
    thresholds: their sets, in order of admission; the last one's prices hold for all
    batch_size: requests in the forward, those without candidates included
    max_nodes:  most nodes of all requests together

    As in `keep`, which this is for a single request: nodes are taken by falling value, and of all
    prefixes of that order the one is kept whose expected tokens exceed the price of its verify
    cost by most, perhaps none.
    """
    if batch_size == 1:
        return [keep(candidates[0], thresholds[0], batch_size=1, max_nodes=max_nodes)]
    value = np.concatenate([values(c, t) for c, t in zip(candidates, thresholds, strict=True)])
    owner = np.repeat(np.arange(len(candidates)), [len(c) for c in candidates])
    taus = np.array([t.buckets[t.bucket_index(batch_size)].tau for t in thresholds])
    # Stable: a parent comes earlier and is never worth less, so it stays before its children.
    order = np.argsort(-value, kind="stable")
    order = order[value[order] >= taus[owner[order]]][:max_nodes]
    context = float(np.mean([c.context for c in candidates]))
    gains = np.cumsum(value[order], dtype=np.float64) - _prices(
        thresholds[-1], batch_size, len(order), context
    )
    best = int(np.argmax(gains)) + 1 if len(gains) and gains.max() > 0 else 0
    chosen = np.sort(order[:best])
    first = np.cumsum([0, *(len(c) for c in candidates)])
    parts = np.split(chosen, np.searchsorted(chosen, first[1:-1]))
    return [(part - start).astype(np.int32) for part, start in zip(parts, first[:-1], strict=True)]


def _prices(
    thresholds: ThresholdSet, batch_size: int, most: int, context: float
) -> NDArray[np.float64]:
    """Expected tokens that 1 to `most` nodes of the batch must bring, float64 [most].

    b nodes among B requests cost what b / B nodes of each would: B times a request's price.
    context: tokens before a step, on average
    """
    bucket = thresholds.bucket_index(batch_size)
    of_a_request = thresholds.prices[bucket]
    scale, slope = thresholds.prices_behind(bucket, context)
    each = np.arange(1, most + 1) / batch_size
    table = np.interp(each, np.arange(len(of_a_request)), of_a_request)
    prices: NDArray[np.float64] = batch_size * (scale * table + slope * each)
    return prices
