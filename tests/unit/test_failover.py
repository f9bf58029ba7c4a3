"""A lost replica shows in no byte: another one goes on behind the tokens sent so far."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments import failover
from deployments.auth import ApiKeys
from deployments.gateway import create_app
from deployments.inbox import NotTakenError, ReplicaLostError
from deployments.messages import GenerateCall, Reply
from deployments.settings import AppArgs
from tests.support.fake_port import InProcessPort

ARGS = AppArgs(model="fake", max_batch_size=4, max_waiting=2)


class LosingPort(InProcessPort):
    """Attempt i at a call is lost after `losses[i]` replies, later ones not at all."""

    def __init__(self, *losses: int) -> None:
        super().__init__(ARGS)
        self.losses = list(losses)
        self.calls: list[GenerateCall] = []

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
        self.calls.append(call)
        left = self.losses.pop(0) if self.losses else None
        replies = super().generate(call)
        try:
            while left != 0:
                yield await anext(replies)
                left = None if left is None else left - 1
        except StopAsyncIteration:
            return
        finally:
            await replies.aclose()
        raise ReplicaLostError


def complete(port: LosingPort, **fields: Any) -> Any:
    with TestClient(create_app(port, ARGS, ApiKeys([]))) as client:
        response = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 9} | fields)
    port.replica._loop.stop()
    assert port.replica._num_unfinished == 0
    return response


def streamed(response: Any) -> tuple[str, list[str]]:
    """(text, the last two events)."""
    events = [e.removeprefix("data: ") for e in response.text.split("\n\n") if e]
    text = "".join(
        json.loads(e)["choices"][0]["text"] for e in events if e != "[DONE]" and "choices" in e
    )
    return text, events[-2:]


@pytest.mark.parametrize("losses", [(0,), (1,), (3,), (2, 1, 1), (5,)])
@pytest.mark.fault(17, 18)
def test_the_answer_is_the_one_of_a_single_replica(losses: tuple[int, ...]) -> None:
    whole = complete(LosingPort(), return_token_ids=True).json()
    port = LosingPort(*losses)
    continued = complete(port, return_token_ids=True).json()
    assert continued["choices"] == whole["choices"]
    assert continued["usage"] == whole["usage"]
    assert len(port.calls) == (1 if losses == (5,) else 1 + len(losses))  # five: it was complete

    text, (last, done) = streamed(complete(LosingPort(*losses), stream=True))
    assert text == whole["choices"][0]["text"]
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


def test_only_unfinished_choices_are_resumed() -> None:
    """Choice 0 ends in the third of six deltas; then the replica is lost."""
    prompts = ["ab", "wxyz"]
    whole = complete(LosingPort(), prompt=prompts).json()["choices"]
    port = LosingPort(9)  # both get a delta a step: nine of them end the first of two prompts
    assert complete(port, prompt=prompts).json()["choices"] == whole
    assert port.calls[1].resumed is not None
    assert set(port.calls[1].resumed) == {1}


@pytest.mark.parametrize("losses", [(0, 0), (2, 0)])
@pytest.mark.fault(17, 18)
def test_two_losses_in_a_row_without_a_token_are_an_error(losses: tuple[int, ...]) -> None:
    port = LosingPort(*losses)
    response = complete(port, stream=True)
    assert len(port.calls) == len(losses)
    if losses[0] == 0:  # nothing was sent yet
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
    else:
        assert "[DONE]" not in response.text
        error = json.loads(streamed(response)[1][-1])["error"]
        assert error["message"] == "The replica was lost; try again."


def test_a_call_that_no_replica_has_taken_is_asked_again() -> None:
    """As often as the time allows: nothing has been lost."""

    class Untaken(LosingPort):
        async def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
            if len(self.calls) < 5:
                self.calls.append(call)
                raise NotTakenError
            async for reply in super().generate(call):
                yield reply

    whole, port = complete(LosingPort()), Untaken()
    assert complete(port).json()["choices"] == whole.json()["choices"]
    assert len(port.calls) == 6


def test_the_wait_for_another_replica_ends() -> None:
    """The first is lost, and there is no other: its generator never answers."""

    class Alone:
        num_calls = 0

        async def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
            self.num_calls += 1
            if self.num_calls > 1:
                await asyncio.Event().wait()
            raise ReplicaLostError
            yield

    async def scenario() -> None:
        call = GenerateCall(request_id="r", tenant="t", params=None, max_tokens=4, prompts=("a",))  # type: ignore[arg-type]
        with pytest.raises(failover.ApiError) as caught:
            await anext(failover.generate_through_losses(Alone(), call, timeout_s=0.01))  # type: ignore[arg-type]
        assert caught.value.status == 504

    asyncio.run(scenario())
