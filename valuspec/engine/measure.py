"""Measure a target's verify cost c(n) on the machine it runs on."""

from __future__ import annotations

import time

import numpy as np

from valuspec.cost import ROWS, CostStaircase
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target

CONTEXT = 256
"""Committed tokens before the measured rows: about a prompt and half an answer."""
CHILDREN = 4
"""Branching of the measured trees; attention treats all shapes alike."""
MAX_ROWS = 128
"""Most rows of one measured forward: beyond, no node pays, and the cost grows in proportion."""


def measure_cost(target: Target, *, batch_size: int = 1, repeats: int = 5) -> CostStaircase:
    """Time forwards of `batch_size` sequences with 1 to 64 rows each, MAX_ROWS at most in all."""
    cache = target.new_cache(batch_size)
    cache.reserve(CONTEXT + 128)
    tokens = np.arange(CONTEXT, dtype=np.int64) % target.vocab_size
    for place in range(batch_size):
        target.forward([[SequenceRows.chain(place, 0, tokens)]], cache, np.array([CONTEXT - 1]))

    def forward(num_rows: int) -> float:
        parents = (np.arange(num_rows) - 1) // CHILDREN
        parents[0] = -1
        members = [
            SequenceRows(place, CONTEXT, tokens[:num_rows], parents) for place in range(batch_size)
        ]
        started = time.perf_counter()
        target.forward([members], cache)
        return time.perf_counter() - started

    rows = [n for n in ROWS if n <= 2 or n * batch_size <= MAX_ROWS]
    return CostStaircase.measure(forward, rows, repeats=repeats)
