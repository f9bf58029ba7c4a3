"""A retrieval deployment's handle without Ray: the real desk, and faults on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from deployments.publishing import ThresholdDesk
from retrieval.documents import InMemoryDocuments
from retrieval.store import StoreError
from retrieval.threshold_store import Pointer, ThresholdStore
from valuspec.thresholds import ThresholdSet


class FaultyDocuments(InMemoryDocuments):
    """Calls take `latency()` seconds, so they overlap.

    `fault()` is asked before every call; an exception it returns is raised.
    `lost_reply()` is asked after every change: the change is made, and nobody is told.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fault: Callable[[], Exception | None] = lambda: None
        self.latency: Callable[[], float] = lambda: 0.0
        self.lost_reply: Callable[[], bool] = lambda: False

    async def read(self, key: str) -> bytes | None:
        await self._before()
        return await super().read(key)

    async def create(self, key: str, value: bytes) -> bool:
        await self._before()
        return self._after(await super().create(key, value))

    async def swap(self, *args: Any) -> Any:
        await self._before()
        return self._after(await super().swap(*args))

    async def add_members(self, key: str, *members: str) -> None:
        await self._before()
        self._after(await super().add_members(key, *members))

    async def members(self, key: str) -> set[str]:
        await self._before()
        return await super().members(key)

    async def _before(self) -> None:
        await asyncio.sleep(self.latency())
        error = self.fault()
        if error is not None:
            raise error

    def _after(self, reply: Any) -> Any:
        if self.lost_reply():
            raise StoreError("timeout", "injected: the reply was lost")
        return reply


class DeskHandle:
    """What a `DeploymentHandle` of the retrieval deployment is to a follower."""

    def __init__(self, desk: ThresholdDesk) -> None:
        self.desk = desk
        self.down = False

    def options(self, *, method_name: str) -> SimpleNamespace:
        method: Callable[..., Any] = {
            "poll_thresholds": self.desk.poll,
            "get_thresholds": self.desk.get,
            "threshold_replicas": self._replicas,
        }[method_name]

        async def call(*args: Any) -> Any:
            if self.down:
                raise RuntimeError("injected: the deployment is down")
            return await method(*args)

        return SimpleNamespace(remote=call)

    async def _replicas(self, model: str) -> Any:
        return self.desk.replicas(model)


async def publish(store: ThresholdStore, thresholds: ThresholdSet, reason: str = "test") -> Pointer:
    """Put and activate a set, as a job does."""
    model = thresholds.model_fingerprint
    await store.put(model, thresholds.version, thresholds.to_json())
    pointer = await store.pointer(model)
    return await store.activate(
        model,
        thresholds.version,
        expected_revision=pointer.revision if pointer else 0,
        reason=reason,
    )


async def awaited(call: Awaitable[Any]) -> Any:
    """The result of a call, or the exception it raised."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - tests look at it
        return error


class CountingTelemetry:
    """`Telemetry` without Ray's metrics."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1, **tags: str) -> None:
        self.totals["_".join([name, *tags.values()])] += amount

    def gauge(self, name: str, value: float, **tags: str) -> None:
        pass
