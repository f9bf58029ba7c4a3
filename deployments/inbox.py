"""A gateway's open calls, and one stream of replies from every replica that works on them."""

from __future__ import annotations

import asyncio
import contextvars
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.messages import GenerateCall, ReplicaName, Reply


class ReplicaLostError(Exception):
    """The replica died while it worked on the request."""


@dataclass(slots=True, eq=False)
class _OpenCall:
    arrived: asyncio.Queue[Reply | Exception | None] = field(default_factory=asyncio.Queue)
    """None ends the call."""
    replica: ReplicaName | None = None
    ended: bool = False

    def put(self, reply: Reply | Exception | None) -> None:
        self.ended |= reply is None or isinstance(reply, Exception)
        self.arrived.put_nowait(reply)


class Inbox:
    """Calls of target replicas whose replies come by way of `deployments.outbox`."""

    def __init__(self, target: DeploymentHandle[Any]) -> None:
        # Options are set once: each `.options()` opens new connections to the replicas.
        self._begin = target.options(method_name="begin", stream=True)
        self._replies = target.options(method_name="replies", stream=True)
        self._gateway = uuid.uuid4().hex
        self._calls: dict[str, _OpenCall] = {}
        self._readers: dict[ReplicaName, asyncio.Task[None]] = {}

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        """Replies to `call`. Closing it cancels the request.

        Raises ReplicaLostError, or what Serve or the replica raised.
        """
        key, opened = uuid.uuid4().hex, _OpenCall()
        self._calls[key] = opened
        begun = self._begin.remote(call, self._gateway, key)
        stream = cast(DeploymentResponseGenerator[Any], begun)
        follower = asyncio.create_task(self._follow(stream, opened))
        try:
            while (reply := await opened.arrived.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            del self._calls[key]
            follower.cancel()
            # Of a call that Serve has refused, this raises the refusal once more.
            stream.cancel()  # type: ignore[no-untyped-call]

    async def _follow(self, stream: DeploymentResponseGenerator[Any], opened: _OpenCall) -> None:
        """Read from the replica that has taken the call; tell the call when that fails."""
        try:
            async for replica in stream:  # one; the stream then lasts as long as the call
                opened.replica = replica
                self._read_from(replica)
        except Exception as error:  # noqa: BLE001 - raised where the call is read
            opened.put(error)

    def _read_from(self, replica: ReplicaName) -> None:
        if replica not in self._readers:
            # In a context of its own: Serve cancels with a request all that was called in its
            # context, and this serves the others too.
            self._readers[replica] = asyncio.create_task(
                self._read(replica), context=contextvars.Context()
            )

    async def _read(self, replica: ReplicaName) -> None:
        """Hand out a replica's replies for as long as it has calls of this gateway."""
        failed = False
        batches = self._replies.remote(replica, self._gateway)
        try:
            async for batch in cast(DeploymentResponseGenerator[Any], batches):
                for key, reply in batch:
                    if key in self._calls:
                        self._calls[key].put(reply)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - replies may be missing
            failed = True
        del self._readers[replica]
        waiting = [c for c in self._calls.values() if c.replica == replica and not c.ended]
        if failed:
            for call in waiting:
                call.put(ReplicaLostError())
        elif waiting:  # they came when the replica had just seen its last one go
            self._read_from(replica)
