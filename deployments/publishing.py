"""The way from the threshold store to the replicas.

The store is known to the retrieval deployment alone: it may be a Valkey of its own, on a unix
socket of its node. There a `ThresholdDesk` answers the polls; in every process that uses a set, a
`ThresholdFollower` polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import asdict, dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.thresholds import ActiveThresholds
from retrieval.breaker import CircuitBreaker
from retrieval.store import StoreError
from retrieval.threshold_store import Pointer, ThresholdStore
from valuspec.errors import ThresholdError
from valuspec.thresholds import ThresholdSet

logger = logging.getLogger(__name__)

POLL_S = 3.0
"""Mean time between two polls; each waits 0.5 to 1.5 times as long, so that polls spread out."""
PATIENCE_S = 5.0
FORGET_AFTER_S = 10 * POLL_S
"""A replica that has not polled for so long is gone."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a follower says of itself with each poll."""

    replica: str
    model: str
    version: str
    revision: int
    """0 while no pointer decided about the set in use."""
    origin: str
    pinned: str | None


@dataclass(frozen=True, slots=True)
class Polled:
    """The pointer as far as it is known. `error` is why it is not: a StoreErrorKind or "open"."""

    pointer: Pointer | None
    error: str | None = None


class ThresholdDesk:
    """The store behind a circuit breaker, and a record of who uses which version.

    Failures are answers, not exceptions: while the store is gone, every replica still polls.
    """

    def __init__(
        self,
        store: ThresholdStore,
        *,
        on_error: Callable[[StoreError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._on_error = on_error
        self._clock = clock
        self._breaker = CircuitBreaker(clock=clock)
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}  # by replica, when it was told

    async def poll(self, report: ReplicaReport) -> Polled:
        """The pointer of the replica's model."""
        self._reports[report.replica] = (self._clock(), report)
        if not self._breaker.allow():
            return Polled(None, "open")
        try:
            pointer = await self._store.pointer(report.model)
        except StoreError as error:
            self._breaker.record_failure()
            self._on_error(error)
            return Polled(None, error.kind)
        self._breaker.record_success()
        return Polled(pointer)

    async def get(self, version: str) -> str | None:
        """The text of a set; None if it is not there or the store fails: either way, ask again."""
        try:
            return await self._store.get(version)
        except StoreError as error:
            logger.warning("threshold set %s not read: %s", version, error)
            return None

    def replicas(self, model: str) -> list[ReplicaReport]:
        """Who has polled lately for this model."""
        oldest = self._clock() - FORGET_AFTER_S
        self._reports = {name: told for name, told in self._reports.items() if told[0] >= oldest}
        reports = (report for _, report in self._reports.values() if report.model == model)
        return sorted(reports, key=lambda report: report.replica)

    async def aclose(self) -> None:
        await self._store.aclose()


class ThresholdFollower:
    """Keeps an `ActiveThresholds` at what the store's pointer says. Use from one event loop."""

    def __init__(
        self,
        active: ActiveThresholds,
        retrieval: DeploymentHandle[Any],
        replica: str,
        count: Callable[..., None],
    ) -> None:
        """replica: a name of this process; count: `Telemetry.count`"""
        self._active = active
        self._poll = retrieval.options(method_name="poll_thresholds")
        self._get = retrieval.options(method_name="get_thresholds")
        self._replicas = retrieval.options(method_name="threshold_replicas")
        self._replica = replica
        self._count = count
        self._task: asyncio.Task[None] | None = None
        self._pointer: Pointer | None = None  # as last seen
        self._error: str | None = None  # why the last poll brought nothing

    async def poll(self) -> None:
        """Ask once and act on the answer. Raises nothing but CancelledError."""
        before = self._error
        try:
            self._error = await self._turn()
        except TimeoutError:
            self._error = "timeout"
        except Exception:
            if before != "error":
                logger.exception("thresholds could not be polled")
            self._error = "error"
        if self._error is not None:
            self._count("valuspec_threshold_polls_failed", reason=self._error)
            if before is None:  # the first of what may be many
                logger.warning("thresholds stay as they are, poll failed: %s", self._error)

    def start(self) -> None:
        """Poll from now on; harmless if that goes on already. Needs a running event loop."""
        if self._task is None or self._task.done():
            # Without a context of its own, it would log under the request that started it.
            self._task = asyncio.create_task(self._run(), context=Context())

    async def status(self) -> dict[str, Any]:
        """What the store said last, and what other replicas said to it; JSON values."""
        reports: list[ReplicaReport] | None = None
        with contextlib.suppress(Exception):
            async with asyncio.timeout(PATIENCE_S):
                reports = await self._replicas.remote(self._active.model_fingerprint)
        pointer = self._pointer
        return {
            "error": self._error,
            "version": pointer and pointer.version,
            "revision": pointer.revision if pointer else 0,
            "previous": pointer and pointer.previous,
            "history": [asdict(activation) for activation in pointer.history] if pointer else [],
            "replicas": reports and [asdict(report) for report in reports],
            "num_versions": reports and len({report.version for report in reports}),
        }

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S * random.uniform(0.5, 1.5))
            await self.poll()

    def _report(self) -> ReplicaReport:
        active = self._active
        return ReplicaReport(
            self._replica,
            active.model_fingerprint,
            active.current.version,
            active.revision,
            active.origin,
            active.pinned,
        )

    async def _turn(self) -> str | None:
        active = self._active
        async with asyncio.timeout(PATIENCE_S):
            polled: Polled = await self._poll.remote(self._report())
        if polled.error is not None:
            return polled.error
        self._pointer = polled.pointer
        version = active.consider(polled.pointer)
        if version is None:
            return None
        async with asyncio.timeout(PATIENCE_S):
            text: str | None = await self._get.remote(version)
        if text is None:
            return "missing"
        active.offer(version, await asyncio.to_thread(_parse, text), polled.pointer)
        return None


def _parse(text: str) -> ThresholdSet | ThresholdError:
    """The set, or why there is none. Never raises: this is the one place that reads what a store
    holds, and whatever lies there must not stop the polling."""
    try:
        parsed = ThresholdSet.from_json(text)
    except ThresholdError as error:
        return error
    except Exception as error:  # noqa: BLE001 - see above
        return ThresholdError(f"not a threshold set: {type(error).__name__}")
    if parsed.to_json() != text:
        return ThresholdError("the text is not what this version of the set reads as")
    return parsed
