"""A TargetPort over a real TargetReplica with a fake engine, in this process and without Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from deployments.errors import ApiError
from deployments.inbox import Inbox
from deployments.messages import GenerateCall, Message, ModelCard, Refusal, Reply
from deployments.schemas import FilterRequest
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from deployments.valuation import Valuation
from tests.support.fake_engine import FakeEngine, FakeTarget
from tests.support.fake_handle import Handle


class InProcessPort:
    """`ready` False stands for a replica that is loading; `engine` may be a real one."""

    def __init__(self, args: AppArgs, engine: Any = None) -> None:
        self.engine = engine or FakeEngine(FakeTarget(), args.max_batch_size)
        self.replica = TargetReplica(
            args, None, None, load=lambda _: (self.engine.target, self.engine)
        )
        self.valuation = Valuation()
        self.ready = True

    def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        return self.replica.generate(call)

    async def check_ready(self) -> None:
        if not self.ready:
            raise ApiError(503, "The model is not ready; try again.", code="not_ready")
        self.replica.check_health()

    async def card(self) -> ModelCard:
        await self.check_ready()
        return await self.replica.card()

    async def encode(self, prompt: str | None, messages: tuple[Message, ...] | None) -> list[int]:
        return _accepted(await self.replica.encode(prompt, messages))

    async def decode(self, token_ids: list[int]) -> str:
        return _accepted(await self.replica.decode(token_ids))

    async def stats(self) -> dict[str, Any]:
        return await self.replica.stats()

    async def thresholds(self) -> dict[str, Any]:
        return await self.replica.thresholds()

    async def filter(self, body: FilterRequest) -> dict[str, Any]:
        model = (await self.replica.card()).model_fingerprint
        return _accepted(await self.valuation.filter(body, model))


def _accepted(reply: Any) -> Any:
    if isinstance(reply, Refusal):
        raise ApiError.of(reply)
    return reply


class InboxPort(InProcessPort):
    """Replies come by way of outbox and inbox, as they do between replica and gateway. For one
    event loop, which a gateway has too."""

    def __init__(self, args: AppArgs, engine: Any = None) -> None:
        super().__init__(args, engine)
        self._inbox = Inbox(Handle(self.replica))

    def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        return self._inbox.generate(call)
