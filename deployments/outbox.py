"""A replica's replies to all calls of one gateway, those of an engine step in one message.

A message costs a replica a quarter of a millisecond, and of the interpreter that steps its engine.
With a stream for each call there would be one per call and step. So a call's own stream only tells
which replica has taken it and keeps it alive; its replies go through the outbox of its gateway.

Behind the gateway a message still becomes an event for each client, which takes CPU that on one
machine is the model's. So messages keep an interval, in which the tokens of a call add up; its
first ones and its last do not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Iterator

from deployments.messages import Delta, Reply

#: Without replies a replica still says this often that it lives.
BEAT_S = 2.0

Addressed = tuple[str, Reply | None]
"""Key of a call, and a reply to it; None when it has been answered."""


class Outbox:
    """What one gateway has not taken yet. To be used on one event loop."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._replies: list[Addressed] = []
        self._begun: set[str] = set()
        """Calls that have had a reply."""
        self._filled = asyncio.Event()
        self._urgent = asyncio.Event()
        self._emptied = asyncio.Event()
        self._num_calls = 0
        self._num_readers = 0

    @property
    def in_use(self) -> bool:
        return self._num_calls + self._num_readers > 0

    def put(self, key: str, reply: Reply | None) -> None:
        self._filled.set()
        if key not in self._begun or not isinstance(reply, Delta) or reply.finish_reason:
            self._urgent.set()
        self._begun.add(key)
        if isinstance(reply, Delta):
            for place, (other, before) in enumerate(self._replies):
                if other == key and isinstance(before, Delta) and before.index == reply.index:
                    self._replies[place] = (key, before.then(reply))
                    return
        self._replies.append((key, reply))

    async def taken(self) -> None:
        """Wait until the gateway has taken all there is."""
        while self._replies:
            self._emptied.clear()
            await self._emptied.wait()

    @contextlib.contextmanager
    def call(self, key: str) -> Iterator[None]:
        """While a call is open, so are the batches."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._begun.discard(key)
            self._filled.set()
            self._urgent.set()

    async def batches(self) -> AsyncGenerator[list[Addressed]]:
        """Yield what has come in, all of it at once, until no call is open; in a silence, an empty
        batch every BEAT_S."""
        self._num_readers += 1
        loop, last = asyncio.get_running_loop(), -math.inf
        try:
            while self._num_calls or self._replies:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._filled.wait()
                if self._replies and not self._urgent.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(last + self._interval_s):
                            await self._urgent.wait()
                if self._num_calls or self._replies:
                    self._filled.clear()
                    self._urgent.clear()
                    batch, self._replies = self._replies, []
                    self._emptied.set()
                    last = loop.time()
                    yield batch
        finally:
            self._num_readers -= 1


class Outboxes:
    """One for each gateway that has calls here, by its name.

    interval_s: between messages to a gateway, see above
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._outboxes: dict[str, Outbox] = {}

    @contextlib.contextmanager
    def of(self, gateway: str) -> Iterator[Outbox]:
        outbox = self._outboxes.setdefault(gateway, Outbox(self._interval_s))
        try:
            yield outbox
        finally:
            if not outbox.in_use:
                self._outboxes.pop(gateway, None)

    def __len__(self) -> int:
        return len(self._outboxes)
