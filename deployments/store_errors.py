"""What the draft-tree store fails at: each counted, and a refused password told, to be put right.

Other failures pass by themselves, or show to whoever runs the store. This one looks from outside as
if all were well: answers come, only slower.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from deployments.telemetry import Telemetry
from retrieval.store import StoreError, refusal

logger = logging.getLogger(__name__)

#: The store is asked every few seconds. After so long without a refusal it was put right meanwhile.
FORGET_AFTER_S = 60.0


class StoreErrors:
    """Hand it every StoreError. Says once that the store refuses us, and again if that comes back.
    For one thread."""

    def __init__(
        self, telemetry: Telemetry, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._refused_at: float | None = None

    def __call__(self, error: StoreError) -> None:
        self._telemetry.count("valuspec_store_errors", kind=error.kind)
        if error.kind == "auth":
            now = self._clock()
            if self._refused_at is None or now - self._refused_at > FORGET_AFTER_S:
                logger.error("%s", refusal(error))
            self._refused_at = now
