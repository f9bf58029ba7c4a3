"""Circuit breaker: stop asking a dependency that keeps failing, and notice when it is back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Closed until `failure_threshold` failures in a row, then open for `cooldown_s` seconds.

    After the cooldown one call per `cooldown_s` may probe (half open): its success closes the
    breaker, its failure opens it again. A probe that never reports cannot block the next one.
    No I/O and no locks; use from one thread (the event loop's).
    """

    def __init__(
        self,
        *,
        failure_threshold: int = 3,
        cooldown_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failure_threshold < 1 or cooldown_s <= 0:
            raise ValueError(
                f"failure_threshold {failure_threshold} must be >= 1 and "
                f"cooldown_s {cooldown_s} > 0"
            )
        self._failure_threshold = failure_threshold
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._failures = 0
        self._retry_at: float | None = None  # None while closed

    @property
    def state(self) -> State:
        if self._retry_at is None:
            return "closed"
        return "open" if self._clock() < self._retry_at else "half_open"

    def allow(self) -> bool:
        """Whether to make the call now. True in the half-open state claims the probe."""
        if self._retry_at is None:
            return True
        now = self._clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + self._cooldown_s
        return True

    def record_success(self) -> None:
        self._failures = 0
        self._retry_at = None

    def record_failure(self) -> None:
        self._failures += 1
        if self._failures >= self._failure_threshold:
            self._retry_at = self._clock() + self._cooldown_s
