"""A replica's replies to all calls of one gateway, those of an engine step in one message.

A message costs a replica a quarter of a millisecond, and of the interpreter that steps its engine.
With a stream for each call there would be one per call and step. So a call's own stream only tells
which replica has taken it and keeps it alive; its replies go through the outbox of its gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from deployments.messages import Reply

#: Without replies a replica still says this often that it lives.
BEAT_S = 2.0

Addressed = tuple[str, Reply | None]
"""Key of a call, and a reply to it; None when it has been answered."""


class Outbox:
    """What one gateway has not taken yet. To be used on one event loop."""

    def __init__(self) -> None:
        self._replies: list[Addressed] = []
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._num_calls = 0
        self._num_readers = 0

    @property
    def in_use(self) -> bool:
        return self._num_calls + self._num_readers > 0

    def put(self, key: str, reply: Reply | None) -> None:
        self._replies.append((key, reply))
        self._filled.set()

    async def taken(self) -> None:
        """Wait until the gateway has taken all there is."""
        while self._replies:
            self._emptied.clear()
            await self._emptied.wait()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """While a call is open, so are the batches."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._filled.set()

    async def batches(self) -> AsyncGenerator[list[Addressed]]:
        """Yield what has come in, all of it at once, until no call is open; in a silence, an empty
        batch every BEAT_S."""
        self._num_readers += 1
        try:
            while self._num_calls or self._replies:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._filled.wait()
                if self._num_calls or self._replies:
                    self._filled.clear()
                    batch, self._replies = self._replies, []
                    self._emptied.set()
                    yield batch
        finally:
            self._num_readers -= 1


class Outboxes:
    """One for each gateway that has calls here, by its name."""

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox] = {}

    @contextlib.contextmanager
    def of(self, gateway: str) -> Iterator[Outbox]:
        outbox = self._outboxes.setdefault(gateway, Outbox())
        try:
            yield outbox
        finally:
            if not outbox.in_use:
                self._outboxes.pop(gateway, None)

    def __len__(self) -> int:
        return len(self._outboxes)
