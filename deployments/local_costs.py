"""What a forward costs on this replica's machine decides how many nodes are worth verifying."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from deployments.engine_loop import EngineLoop
from deployments.loading import Engine
from valuspec.cost import CostStaircase
from valuspec.thresholds import ThresholdSet

#: How often the costs of live forwards are taken into account.
REFRESH_S = 60.0


class LocalCosts:
    """Gives the engine its threshold set, priced at this machine's costs. Use from one thread.

    What requests are proposed may change with it; what they are answered cannot.
    """

    def __init__(
        self,
        engine: Engine,
        loop: EngineLoop[Engine],
        *,
        refreshed: Callable[[Mapping[int, CostStaircase]], None] = lambda costs: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """refreshed: told of the costs whenever they are looked at, on the engine's thread"""
        self._engine = engine
        self._loop = loop
        self._refreshed = refreshed
        self._clock = clock
        self.use(engine.thresholds)

    def use(self, thresholds: ThresholdSet) -> None:
        """For requests that begin from now on; running ones keep their set and its prices."""
        self._thresholds = thresholds
        self._looked_at = self._clock()
        self._loop.run(lambda: self._price(thresholds))

    def refresh(self) -> None:
        """Price anew if it is time to; call it now and then while requests are decoded."""
        if self._clock() - self._looked_at >= REFRESH_S:
            self.use(self._thresholds)

    def _price(self, thresholds: ThresholdSet) -> None:
        costs = self._engine.live_costs.current()
        self._engine.thresholds = replace(thresholds, local_costs=costs)
        self._refreshed(costs)
