"""Verify cost: measured seconds of one decode step, by rows, batch size and context."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valuspec.errors import ThresholdError

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Where c(n) is measured."""
STAIRS = (5, 9, 13, 17)
"""Where it is measured as well for a request that is alone: library kernels take rows by
fours, and the fourth costs next to nothing, the fifth as much as the eighth."""
CONTEXT = 256
"""Tokens that lie before the rows where c(n) is measured: about a prompt and half an answer."""
MIN_STEPS = 16
"""Fewer timed steps say nothing about a point of a staircase."""
WINDOW = 1024
"""Latest steps of one batch size that count."""


@dataclass(frozen=True, slots=True)
class CostStaircase:
    """c(n): seconds of one decode step in which each request of the batch has n rows.

    n = 1 is plain decoding. Points are ascending in rows and never fall in seconds; between two
    points the cost is interpolated, beyond the last it grows at the last slope. A stair, as
    padded kernels have, is written as two points one row apart.

    Behind a context of more than CONTEXT tokens a forward takes longer: c(n) + `extra`.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_token: float = 0.0
    """Seconds that each further token of every request's context adds to a forward."""
    per_key: float = 0.0
    """And those it adds for each row of a request, which attends to it."""
    drafting: float = 0.0
    """Seconds a step takes more because of drafts and their valuation, kept or not."""

    def __post_init__(self) -> None:
        """Raise ThresholdError naming the broken rule."""
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds):
            raise ThresholdError(
                f"cost staircase has {len(self.rows)} rows and {len(self.seconds)} times; "
                "at least two of each expected"
            )
        if self.rows[0] != 1 or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ThresholdError(f"cost rows {self.rows} must ascend from 1")
        if not all(np.isfinite(s) and s > 0 for s in self.seconds):
            raise ThresholdError(f"cost times {self.seconds} must be positive seconds")
        if any(b < a for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ThresholdError(f"cost times {self.seconds} must not fall with more rows")
        others = (self.per_token, self.per_key, self.drafting)
        if not all(np.isfinite(s) and s >= 0 for s in others):
            raise ThresholdError(
                f"seconds per token {self.per_token}, per key {self.per_key} and of drafting "
                f"{self.drafting} must not be negative"
            )

    @classmethod
    def from_points(cls, rows: Sequence[int], seconds: Sequence[float]) -> CostStaircase:
        """Build from measured points: noise that makes more rows look cheaper is levelled out.

        A point above a later one is lowered to it: the larger forward could have done its work.
        """
        levelled = np.minimum.accumulate(np.asarray(seconds, float)[::-1])[::-1]
        return cls(tuple(int(n) for n in rows), tuple(float(s) for s in levelled))

    @classmethod
    def measure(
        cls,
        forward: Callable[[int], float],
        rows: Sequence[int] = ROWS,
        repeats: int = 5,
        until: float = math.inf,
    ) -> CostStaircase:
        """Time `forward(n)`, which runs n rows per request and returns seconds; medians.

        until: `time.perf_counter()` after which no more repeats begin
        """

        def turn() -> list[float]:
            forward(rows[0])  # behind the largest a small forward is slower than behind its like
            return [forward(n) for n in rows]

        forward(rows[-1])  # warm-up
        turns = [turn()]
        while len(turns) < repeats and time.perf_counter() < until:
            turns.append(turn())
        return cls.from_points(rows, [median(times) for times in zip(*turns, strict=True)])

    def table(self, max_rows: int) -> NDArray[np.float64]:
        """Seconds for 1..max_rows rows, float64 [max_rows]."""
        n = np.arange(1, max_rows + 1, dtype=float)
        inside = np.interp(n, self.rows, self.seconds)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return np.where(n > self.rows[-1], self.seconds[-1] + slope * (n - self.rows[-1]), inside)

    def extra(self, rows: Any, context: Any) -> Any:
        """Seconds beyond c(n) of n = `rows` behind `context` tokens; arrays broadcast."""
        most = np.maximum if isinstance(context, np.ndarray) else max  # a step asks for one
        return most(0, context - CONTEXT) * (self.per_token + self.per_key * rows)

    def with_context(
        self, context: int, rows: Sequence[int], more: Sequence[float]
    ) -> CostStaircase:
        """With slopes that make forwards of so many rows take so many `more` seconds behind
        `context` tokens than behind CONTEXT."""
        per_key, per_token = np.polyfit(rows, np.asarray(more) / (context - CONTEXT), 1).tolist()
        return replace(self, per_token=max(0.0, per_token), per_key=max(0.0, per_key))

    def to_json(self) -> dict[str, Any]:
        others = {name: getattr(self, name) for name in ("per_token", "per_key", "drafting")}
        points = {"rows": list(self.rows), "seconds": list(self.seconds)}
        return points | {name: seconds for name, seconds in others.items() if seconds}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostStaircase:
        """What `to_json` wrote; raises ThresholdError, also for what is no staircase at all."""
        try:
            rows = tuple(int(n) for n in data["rows"])
            seconds = tuple(float(s) for s in data["seconds"])
            others = [float(data.get(n, 0)) for n in ("per_token", "per_key", "drafting")]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ThresholdError(f"not a cost staircase: {error!r}") from error
        return cls(rows, seconds, *others)

    def with_others_of(self, cost: CostStaircase, times: int) -> CostStaircase:
        """With slopes and drafting as of the other, which is of a batch so many times smaller."""
        return replace(
            self,
            per_token=times * cost.per_token,
            per_key=times * cost.per_key,
            drafting=times * cost.drafting,
        )

    def of_batch(self, times: int, rows: Sequence[int]) -> CostStaircase:
        """An estimate for a batch so many times larger: as if only the sum of rows mattered."""
        table = self.table(times * rows[-1])
        estimate = CostStaircase(tuple(rows), tuple(float(table[times * n - 1]) for n in rows))
        return estimate.with_others_of(self, times)

    def refreshed(
        self,
        rows: NDArray[np.float64],
        contexts: NDArray[np.float64],
        seconds: NDArray[np.float64],
        drafting: NDArray[np.float64],
    ) -> CostStaircase:
        """This staircase after timed steps, float64 [num_steps] each.

        rows, contexts: of a request, on average
        seconds: without those of drafting, which are 0 where nobody drafts
        Each step counts for the point nearest to it. Points with too few go the way of their
        neighbours.
        """
        drafted = drafting[drafting > 0]
        known_drafting = float(drafted.mean()) if len(drafted) >= MIN_STEPS else self.drafting
        points = np.asarray(self.rows, float)
        table = self.table(max(2, math.ceil(rows.max(initial=1.0))))
        expected = np.interp(rows, np.arange(1, len(table) + 1), table)
        ratio = seconds / (expected + self.extra(rows, contexts))
        nearest = np.searchsorted((points[1:] + points[:-1]) / 2, rows)
        known = np.flatnonzero(np.bincount(nearest, minlength=len(points)) >= MIN_STEPS)
        if not len(known):
            return replace(self, drafting=known_drafting)
        found = [np.median(ratio[nearest == point]) for point in known]
        scale = np.interp(points, points[known], found)
        levelled = self.from_points(self.rows, np.asarray(self.seconds) * scale)
        on_average = float(scale.mean())
        return replace(
            levelled,
            per_token=on_average * self.per_token,
            per_key=on_average * self.per_key,
            drafting=known_drafting,
        )


class LiveCosts:
    """The verify costs of this machine: measured once, then held to what steps really take.

    Use from one thread.
    """

    def __init__(
        self,
        measured: Mapping[int, CostStaircase],
        *,
        keep: Callable[[dict[int, CostStaircase]], None] = lambda costs: None,
    ) -> None:
        """measured: cost staircase by batch size; steps of other batch sizes do not count
        keep: told at the end what was learned, for the next start"""
        self._measured = dict(measured)
        self._keep = keep
        self._steps: dict[int, deque[tuple[float, float, float, float]]] = {
            size: deque(maxlen=WINDOW) for size in measured
        }

    def add(
        self, *, batch_size: int, num_rows: int, context: int, seconds: float, drafting: float = 0
    ) -> None:
        """Count one step; rows and tokens of context are sums over the batch.

        seconds: of the step; drafting: those of them that drafts and their valuation took
        """
        if batch_size in self._steps:
            step = (num_rows / batch_size, context / batch_size, seconds - drafting, drafting)
            self._steps[batch_size].append(step)

    def current(self) -> dict[int, CostStaircase]:
        """Cost staircases by batch size."""
        costs = {}
        for size, measured in self._measured.items():
            steps = np.array(self._steps[size], float).reshape(-1, 4)
            costs[size] = measured.refreshed(*steps.T)
        return costs

    def close(self) -> None:
        """Hand over what was learned, if anything was."""
        costs = self.current()
        if costs != self._measured:
            self._keep(costs)
