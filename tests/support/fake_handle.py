"""A deployment handle over a target replica of this process, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from deployments.target import TargetReplica


class Stream:
    """What Serve returns of a streaming call: it runs by itself, and can be cancelled."""

    def __init__(self, replies: AsyncGenerator[Any]) -> None:
        self._replies = replies
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._replies) as replies:
                async for reply in replies:
                    self._queue.put_nowait(reply)
            self._queue.put_nowait(StopAsyncIteration())
        except Exception as error:  # noqa: BLE001 - raised where it is read
            self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            reply = await self._queue.get()
            if isinstance(reply, StopAsyncIteration):
                return
            if isinstance(reply, BaseException):
                raise reply
            yield reply

    def cancel(self) -> None:
        self._task.cancel()

    def break_off(self, error: BaseException) -> None:
        self._task.cancel()
        self._queue.put_nowait(error)


class Handle:
    """A deployment handle with one replica behind it."""

    def __init__(self, replica: TargetReplica) -> None:
        self.replica = replica
        self.streams: dict[str, list[Stream]] = {"begin": [], "replies": []}
        self.batches: list[list[str]] = []
        """Keys of the calls, of every message."""

    def options(self, *, method_name: str, stream: bool) -> Any:
        assert stream
        return _Method(self, method_name)

    async def _noted(self, batches: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        async with contextlib.aclosing(batches):
            async for batch in batches:
                self.batches.append([key for key, _ in batch])
                yield batch


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: Any) -> Stream:
        replies = getattr(self._handle.replica, self._name)(*args)
        stream = Stream(self._handle._noted(replies) if self._name == "replies" else replies)
        self._handle.streams[self._name].append(stream)
        return stream
