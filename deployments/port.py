"""What the gateway asks of the deployments behind it, and how it asks over Ray Serve handles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol, cast

import ray.exceptions
from grpc.aio import AioRpcError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.errors import ApiError, busy
from deployments.inbox import Inbox, ReplicaLostError
from deployments.messages import GenerateCall, Message, ModelCard, Refusal, Reply
from deployments.schemas import FilterRequest

#: How long a route waits for a replica that may be loading before it answers 503.
READY_TIMEOUT_S = 3.0

#: How a replica's death shows, by what of it was under way and how Serve carried it.
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, AioRpcError)


class TargetPort(Protocol):
    """Coroutines raise ApiError: 503 while no replica is ready, else what the replica refused."""

    def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        """Closing the generator cancels the request. Raises ApiError 429, ReplicaLostError."""

    async def check_ready(self) -> None: ...
    async def card(self) -> ModelCard: ...
    async def encode(
        self, prompt: str | None, messages: tuple[Message, ...] | None
    ) -> list[int]: ...
    async def decode(self, token_ids: list[int]) -> str: ...
    async def stats(self) -> dict[str, Any]: ...
    async def thresholds(self) -> dict[str, Any]: ...
    async def filter(self, body: FilterRequest) -> dict[str, Any]: ...


class HandlePort:
    """TargetPort over deployment handles."""

    def __init__(self, target: DeploymentHandle[Any], valuation: DeploymentHandle[Any]) -> None:
        self._target = target
        self._inbox = Inbox(target)
        self._valuation = valuation
        self._card: ModelCard | None = None

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        try:
            async with contextlib.aclosing(self._inbox.generate(call)) as replies:
                async for reply in replies:
                    yield reply
        except BackPressureError:
            raise busy() from None
        except (*_LOST, DeploymentUnavailableError) as error:
            raise ReplicaLostError from error

    async def check_ready(self) -> None:
        try:
            await _ready(self._target.check_health.remote())
        except ApiError as error:
            if error.status != 429:  # a full server is a healthy one
                raise

    async def card(self) -> ModelCard:
        if self._card is None:  # the same for as long as the app runs
            self._card = await _ready(self._target.card.remote())
        return self._card

    async def encode(self, prompt: str | None, messages: tuple[Message, ...] | None) -> list[int]:
        reply = await _ready(self._target.encode.remote(prompt, messages))
        return cast(list[int], _accepted(reply))

    async def decode(self, token_ids: list[int]) -> str:
        return cast(str, _accepted(await _ready(self._target.decode.remote(token_ids))))

    async def stats(self) -> dict[str, Any]:
        return cast(dict[str, Any], await _ready(self._target.stats.remote()))

    async def thresholds(self) -> dict[str, Any]:
        return cast(dict[str, Any], await _ready(self._target.thresholds.remote()))

    async def filter(self, body: FilterRequest) -> dict[str, Any]:
        model = (await self.card()).model_fingerprint
        reply = await _ready(self._valuation.filter.remote(body, model))
        return cast(dict[str, Any], _accepted(reply))


def _accepted(reply: Any) -> Any:
    if isinstance(reply, Refusal):
        raise ApiError.of(reply)
    return reply


async def _ready(response: Any) -> Any:
    """Result of a quick call; ApiError 503 when no healthy replica answers in time."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            return await response
    except BackPressureError:
        raise busy() from None
    except (TimeoutError, ray.exceptions.RayError, *_LOST, DeploymentUnavailableError) as error:
        raise ApiError(
            503, "The model is not ready; try again.", code="not_ready", retry_after_s=2
        ) from error
