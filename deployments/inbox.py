"""A gateway's open calls, and one stream of replies from every replica that works on them."""

from __future__ import annotations

import asyncio
import contextvars
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.messages import GenerateCall, ReplicaName, Reply
from deployments.outbox import BEAT_S

#: A replica that has said nothing for so long is lost: stopped, or cut off. Its connections may
#: stay open, and Ray takes minutes to tell.
SILENCE_S = 5 * BEAT_S
#: Replicas that have fallen silent get no new calls for so long, unless there is no other.
_AVOIDED_S = 60.0


class ReplicaLostError(Exception):
    """The replica died or fell silent while it worked on the request."""


class NotTakenError(ReplicaLostError):
    """No replica has taken the call within SILENCE_S: there is none, or it fell to a silent one."""


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
        self._silent: dict[ReplicaName, float] = {}
        """Replicas that have fallen silent, and when."""

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        """Replies to `call`. Closing it cancels the request.

        Raises ReplicaLostError, or what Serve or the replica raised.
        """
        now = time.monotonic()
        self._silent = {r: at for r, at in self._silent.items() if now - at < _AVOIDED_S}
        call = replace(call, avoided=frozenset(self._silent))
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
        silence = asyncio.timeout(SILENCE_S)
        try:
            async with silence:
                async for replica in stream:  # one; the stream then lasts as long as the call
                    silence.reschedule(None)
                    opened.replica = replica
                    self._read_from(replica)
        except Exception as error:  # noqa: BLE001 - raised where the call is read
            opened.put(NotTakenError() if silence.expired() else error)

    def _read_from(self, replica: ReplicaName) -> None:
        if replica not in self._readers:
            # In a context of its own: Serve cancels with a request all that was called in its
            # context, and this serves the others too.
            self._readers[replica] = asyncio.create_task(
                self._read(replica), context=contextvars.Context()
            )

    async def _read(self, replica: ReplicaName) -> None:
        """Hand out a replica's replies for as long as it has calls of this gateway."""
        failed, silence = False, asyncio.timeout(SILENCE_S)
        batches = cast(
            DeploymentResponseGenerator[Any], self._replies.remote(replica, self._gateway)
        )
        try:
            async with silence:
                async for batch in batches:
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
                    for key, reply in batch:
                        if key in self._calls:
                            self._calls[key].put(reply)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - replies may be missing
            failed = True
        if silence.expired():
            self._silent[replica] = time.monotonic()
            batches.cancel()  # type: ignore[no-untyped-call]
        del self._readers[replica]
        waiting = [c for c in self._calls.values() if c.replica == replica and not c.ended]
        if failed:
            for call in waiting:
                call.put(ReplicaLostError())
        elif waiting:  # they came when the replica had just seen its last one go
            self._read_from(replica)
