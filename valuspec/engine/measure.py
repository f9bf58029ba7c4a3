"""Measure a target's verify cost c(n) on the machine it runs on."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from valuspec.cost import CONTEXT, ROWS, STAIRS, CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.engine.kv_cache import own_blocks
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.thresholds import ThresholdSet
from valuspec.valuation import keep

FAR = 1536
"""A context behind which forwards of ROWS_FAR rows are measured as well."""
ROWS_FAR = (1, 8, 16)
TURNS_FAR = 3
TURNS_DRAFTED = 5
ANSWERS, LETTERS = 64, 16
"""Known answers, of few different tokens, when drafting is measured: plenty recurs."""
CHILDREN = 4
"""Branching of the measured trees; attention treats all shapes alike."""
MAX_ROWS = 128
"""Most rows of one measured forward: beyond, no node pays, and the cost grows in proportion."""
BUDGET_S = 5.0
"""Measuring all batch sizes ends soon after so many seconds."""


def measure_cost(target: Target, *, batch_size: int = 1, repeats: int = 5) -> CostStaircase:
    """Time forwards of `batch_size` sequences with 1 to 64 rows each, MAX_ROWS at most in all."""
    batch = _Batch(target, batch_size)
    cost = CostStaircase.measure(partial(batch.forward, batch_size), points(batch_size), repeats)
    return cost.with_others_of(_of_one_request(target, cost), batch_size)


class MeasuredCosts(NamedTuple):
    """Cost staircases by batch size, and how undisturbed the measuring was."""

    costs: dict[int, CostStaircase]
    running_share: float
    """Share of the time in which the measuring thread really ran; far below 1 on a busy machine."""


def measure_costs(
    target: Target, max_batch_size: int, *, budget_s: float = BUDGET_S
) -> MeasuredCosts:
    """Cost staircases by batch size: the powers of two up to `max_batch_size`, and itself.

    Batch size 1 is measured whatever it takes. A larger one gets the time that is left, or, when
    none is, an estimate from the one before it.
    """
    started, started_running = time.perf_counter(), time.thread_time()
    until = started + budget_s
    sizes = [2**i for i in range(max_batch_size.bit_length()) if 2**i < max_batch_size]
    batch = _Batch(target, max_batch_size)
    costs: dict[int, CostStaircase] = {}
    measured = 1
    for size in [*sizes, max_batch_size]:
        if costs and time.perf_counter() > until:
            costs[size] = costs[measured].of_batch(-(-size // measured), points(size))
            continue
        cost = CostStaircase.measure(partial(batch.forward, size), points(size), until=until)
        if not costs:
            alone = _of_one_request(target, cost)
        costs[size] = cost.with_others_of(alone, size)
        measured = size
    running_s = time.thread_time() - started_running
    return MeasuredCosts(costs, running_s / (time.perf_counter() - started))


def points(batch_size: int) -> list[int]:
    """Rows of each request at which a batch is measured."""
    if batch_size == 1:
        return sorted({*ROWS, *STAIRS})
    return [n for n in ROWS if n <= 2 or n * batch_size <= MAX_ROWS]


def _of_one_request(target: Target, cost: CostStaircase) -> CostStaircase:
    """The staircase with slopes, as far as the model can see, and with the time of drafts.

    Near and far forwards take turns: what a longer context adds is less than a machine's speed
    changes from minute to minute.
    """
    near = _Batch(target, 1)
    cost = replace(cost, drafting=_drafting(near))
    context = min(FAR, target.max_model_len - MAX_ROWS) // CONTEXT * CONTEXT
    if context <= CONTEXT:
        return cost
    far = _Batch(target, 1, context)
    turns = []
    for _ in range(1 + TURNS_FAR):
        turns.append([far.forward(1, n) - near.forward(1, n) for n in ROWS_FAR])
    more = [median(differences) for differences in zip(*turns[1:], strict=True)]
    return cost.with_context(context, ROWS_FAR, more)


def _drafting(batch: _Batch) -> float:
    """Seconds to draft for one request, and to value it, behind forwards: these leave none of its
    code and data in the processor's caches."""
    text = np.random.default_rng(0).integers(0, LETTERS, (ANSWERS, CONTEXT), np.int32)
    drafter, thresholds = Drafter(), ThresholdSet.starting("any model's")
    for answer in text:
        drafter.remember("", answer[:0], answer)
    session = drafter.start("", text[0])
    times = []
    for token in text[0, : 1 + TURNS_DRAFTED]:
        batch.forward(1, 1)
        started = time.perf_counter()
        keep(session.propose(), thresholds, batch_size=1, max_nodes=MAX_ROWS)
        session.extend([token])
        times.append(time.perf_counter() - started)
    return median(times[1:])


class _Batch:
    """Sequences of so many tokens, a multiple of CONTEXT, to verify trees of."""

    def __init__(self, target: Target, num_sequences: int, context: int = CONTEXT) -> None:
        self._target = target
        self._context = context
        self._cache = target.new_cache(own_blocks(num_sequences, context + MAX_ROWS))
        self._tokens = np.arange(CONTEXT, dtype=np.int64) % target.vocab_size
        prompt = SequenceRows.chain(0, 0, self._tokens)
        target.forward([prompt], self._cache, np.array([CONTEXT - 1]))
        slots, first = np.arange(CONTEXT), np.zeros(CONTEXT, np.int64)
        computed = self._cache.cells(first, slots)
        for place in range(num_sequences):  # what is in a cell does not change the time
            for shift in range(0, context, CONTEXT):
                self._cache.move(computed, self._cache.cells(first + place, shift + slots))

    def forward(self, batch_size: int, num_rows: int) -> float:
        """Seconds of one forward of the first sequences, each with a tree of `num_rows` rows."""
        parents = (np.arange(num_rows) - 1) // CHILDREN
        parents[0] = -1
        members = [
            SequenceRows(place, self._context, self._tokens[:num_rows], parents)
            for place in range(batch_size)
        ]
        started = time.perf_counter()
        self._target.forward(members, self._cache)
        self._target.wait()
        return time.perf_counter() - started
