"""Replies on their way: those of a step together, none lost, none to the wrong call."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments import inbox as inbox_module
from deployments import outbox as outbox_module
from deployments.inbox import Inbox, NotTakenError, ReplicaLostError
from deployments.messages import Delta, GenerateCall, Refusal, ReplicaName, Reply
from deployments.outbox import Outbox
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from tests.support.fake_engine import FakeEngine, FakeTarget
from tests.support.fake_handle import Handle
from tests.support.retrieving import eventually
from valuspec.engine.types import SamplingParams

ARGS = AppArgs(model="fake", max_batch_size=4, max_waiting=2)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(FakeTarget(), ARGS.max_batch_size)


@pytest.fixture
def handle(engine: FakeEngine) -> Handle:
    return Handle(TargetReplica(ARGS, None, None, load=lambda _: (engine.target, engine)))


def call(prompt: str, max_tokens: int = 8) -> GenerateCall:
    return GenerateCall(
        request_id=prompt,
        tenant="t",
        params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        prompts=(prompt,),
    )


async def text(replies: AsyncGenerator[Reply]) -> str:
    return "".join([r.text async for r in replies if isinstance(r, Delta)])


def test_a_step_is_one_message_and_every_call_gets_its_own(handle, engine) -> None:
    async def run() -> list[str]:
        inbox = Inbox(handle)
        engine.gate.clear()
        asked = [asyncio.create_task(text(inbox.generate(call(p)))) for p in ("ab", "xyz", "q")]
        commands = handle.replica._loop._commands
        await eventually(lambda: engine.num_running + commands.qsize() == 3)
        engine.gate.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(run()) == ["abababab", "xyzxyzxy", "qqqqqqqq"]
    assert len(handle.streams["replies"]) == 1
    assert max(len(set(batch)) for batch in handle.batches) == 3
    assert len(handle.batches) < 3 * 4, "four steps of three calls"
    assert not len(handle.replica._outboxes)


def test_only_the_first_and_the_last_tokens_do_not_wait(engine) -> None:
    """Nothing is lost of what the others add up to."""
    args = ARGS.model_copy(update={"stream_interval_s": 3600})
    handle = Handle(TargetReplica(args, None, None, load=lambda _: (engine.target, engine)))
    prompts = ("ab", "xyz", "q")

    async def run() -> list[list[Reply]]:
        inbox = Inbox(handle)

        async def replies(prompt: str) -> list[Reply]:
            return [reply async for reply in inbox.generate(call(prompt, max_tokens=40))]

        return await asyncio.gather(*map(replies, prompts))

    for prompt, replies in zip(prompts, asyncio.run(run()), strict=True):
        assert "".join(reply.text for reply in replies) == (prompt * 40)[:40]
        assert sum(len(reply.token_ids) for reply in replies) == 40
        assert [reply.finish_reason for reply in replies[:-1]] == [None] * (len(replies) - 1)
        assert len(replies) <= 2 * len(prompts), "its own first and last, and those of the others"


def test_calls_one_after_the_other_open_the_replies_anew(handle) -> None:
    async def run() -> list[str]:
        inbox = Inbox(handle)
        return [await text(inbox.generate(call(p))) for p in ("ab", "cd", "ef")]

    assert asyncio.run(run()) == ["abababab", "cdcdcdcd", "efefefef"]
    assert not len(handle.replica._outboxes)


def test_a_refusal_comes_through(handle, engine) -> None:
    async def run() -> list[Reply]:
        inbox = Inbox(handle)
        return [reply async for reply in inbox.generate(call("ab", max_tokens=1000))]

    (refusal,) = asyncio.run(run())
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


def test_closing_a_call_cancels_it_and_no_other(handle, engine) -> None:
    async def run() -> str:
        inbox = Inbox(handle)
        engine.hold_after_step = 1
        leaving = inbox.generate(call("ab", max_tokens=100))
        await anext(leaving)
        staying = asyncio.create_task(text(inbox.generate(call("xy"))))
        await eventually(lambda: handle.replica._num_unfinished == 2)
        await leaving.aclose()
        await eventually(lambda: handle.replica._num_unfinished == 1)
        engine.gate.set()
        answer = await staying
        assert not inbox._calls
        return answer

    assert asyncio.run(run()) == "xyxyxyxy"
    assert len(engine.cancelled) == 1
    assert not len(handle.replica._outboxes)
    assert handle.replica._num_unfinished == 0


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        ("begin", ReplicaLostError()),
        ("replies", OSError()),
        ("replies", asyncio.CancelledError()),
    ],
)
def test_a_broken_stream_is_a_lost_replica(
    handle, engine, stream: str, error: BaseException
) -> None:
    """And the next call does not miss it."""

    async def run() -> None:
        inbox = Inbox(handle)
        engine.hold_after_step = 1
        replies = inbox.generate(call("ab", max_tokens=100))
        await anext(replies)
        handle.streams[stream][0].break_off(error)
        try:
            with pytest.raises(ReplicaLostError):
                await anext(replies)
        finally:
            engine.gate.set()
        assert await asyncio.wait_for(text(inbox.generate(call("xy"))), 30) == "xyxyxyxy"

    asyncio.run(run())


async def stopped(*_: Any) -> AsyncGenerator[Any]:
    """A method of a replica whose process is stopped: it neither answers nor fails."""
    await asyncio.Event().wait()
    yield


def test_a_silent_replica_is_a_lost_one_and_avoided(handle, monkeypatch) -> None:
    monkeypatch.setattr(inbox_module, "SILENCE_S", 0.05)

    async def run() -> list[Any]:
        inbox = Inbox(handle)
        begin, replies, avoided = handle.replica.begin, handle.replica.replies, []

        def noted(call: GenerateCall, *args: Any) -> Any:
            avoided.append(call.avoided)
            return begin(call, *args)

        handle.replica.begin, handle.replica.replies = noted, stopped
        with pytest.raises(ReplicaLostError):
            await text(inbox.generate(call("ab")))
        handle.replica.replies = replies
        monkeypatch.setattr(inbox_module, "SILENCE_S", 30)
        assert await text(inbox.generate(call("xy"))) == "xyxyxyxy"
        monkeypatch.setattr(inbox_module, "_AVOIDED_S", 0)
        assert await text(inbox.generate(call("xy"))) == "xyxyxyxy"
        return avoided

    assert asyncio.run(run()) == [set(), {handle.replica._name}, set()]


def test_a_call_that_no_replica_takes_is_given_back(handle, monkeypatch) -> None:
    monkeypatch.setattr(inbox_module, "SILENCE_S", 0.05)

    async def run() -> None:
        begin, handle.replica.begin = handle.replica.begin, stopped
        inbox = Inbox(handle)
        with pytest.raises(NotTakenError):
            await text(inbox.generate(call("ab")))
        handle.replica.begin = begin
        monkeypatch.setattr(inbox_module, "SILENCE_S", 30)
        assert await text(inbox.generate(call("xy"))) == "xyxyxyxy"

    asyncio.run(run())
    assert handle.replica._num_unfinished == 0


def test_a_replica_with_nothing_to_say_says_so(handle, engine, monkeypatch) -> None:
    """A long prompt is no silence."""
    monkeypatch.setattr(outbox_module, "BEAT_S", 0.01)
    monkeypatch.setattr(inbox_module, "SILENCE_S", 1)

    async def run() -> str:
        inbox = Inbox(handle)
        engine.gate.clear()
        answer = asyncio.create_task(text(inbox.generate(call("ab"))))
        await eventually(lambda: handle.batches.count([]) > 200)  # two seconds
        engine.gate.set()
        return await answer

    assert asyncio.run(run()) == "abababab"


def test_replies_do_not_belong_to_the_request_that_first_wanted_them(handle) -> None:
    """Serve ends with a request what was called in its context."""
    request = contextvars.ContextVar("request", default="nobody's")
    seen = []

    async def run() -> None:
        inbox = Inbox(handle)
        replies = handle.replica.replies

        def noted(*args: Any) -> Any:
            seen.append(request.get())
            return replies(*args)

        handle.replica.replies = noted
        request.set("this one's")
        await text(inbox.generate(call("ab")))

    asyncio.run(run())
    assert seen == ["nobody's"]


def test_replies_of_another_replica_are_a_lost_replica(handle, engine) -> None:
    async def run() -> None:
        inbox = Inbox(handle)
        handle.replica._name = ReplicaName("new")
        begin = handle.replica.begin

        async def began_at_the_old_one(*args: Any) -> AsyncGenerator[ReplicaName]:
            async for _ in begin(*args):
                yield ReplicaName("old")

        handle.replica.begin = began_at_the_old_one
        with pytest.raises(ReplicaLostError):
            await text(inbox.generate(call("ab")))

    asyncio.run(run())


def test_what_the_replica_raises_is_raised_here(handle) -> None:
    async def run() -> None:
        def fails(*_: Any) -> Any:
            raise OSError("disk")

        handle.replica._loop.submit = fails
        with pytest.raises(OSError, match="disk"):
            await text(Inbox(handle).generate(call("ab")))

    asyncio.run(run())


def test_gateways_do_not_get_each_others_replies(handle) -> None:
    async def run() -> list[str]:
        asked = [text(Inbox(handle).generate(call(p))) for p in ("ab", "cd")]
        return await asyncio.gather(*asked)

    assert asyncio.run(run()) == ["abababab", "cdcdcdcd"]
    assert len(handle.streams["replies"]) == 2


def test_batches_end_with_the_last_call_though_it_was_cancelled() -> None:
    async def run() -> list[Any]:
        outbox = Outbox(interval_s=0)
        taken = []

        async def read() -> None:
            async for batch in outbox.batches():
                taken.append(batch)

        with outbox.call("k"):
            reader = asyncio.create_task(read())
            await asyncio.sleep(0)
        await asyncio.wait_for(reader, 10)
        return taken

    assert asyncio.run(run()) == []


def test_the_engines_thread_is_the_one_that_loaded_it() -> None:
    threads = []

    def load(_: AppArgs) -> Any:
        threads.append(threading.current_thread())
        engine = FakeEngine(FakeTarget(), 2)
        return engine.target, engine

    replica = TargetReplica(ARGS, None, None, load=load)
    assert threads == [replica._loop._thread]
