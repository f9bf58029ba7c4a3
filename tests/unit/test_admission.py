"""What the gateway takes, refuses and ends, over apps that wait until they are told to go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from deployments.admission import Admission
from deployments.auth import ApiKeys
from deployments.gateway import create_app
from deployments.messages import GenerateCall, Reply
from deployments.settings import AppArgs
from tests.support.fake_port import InProcessPort


class Site:
    """An app behind `Admission`, whose answers wait for `go`."""

    def __init__(self, max_open_requests: int = 8) -> None:
        self.admission = Admission(max_open_requests)
        self.go = asyncio.Event()
        self._begun = asyncio.Semaphore(0)
        app = Starlette()
        app.add_route("/whole", self._whole)
        app.add_route("/stream", self._stream)
        app.add_route("/slow", self._slow)
        app.add_route("/health", self._health)
        app.add_middleware(self.admission.around)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x"
        )

    async def ask(self, path: str) -> asyncio.Task[httpx.Response]:
        """A request that has reached the app."""
        asked = asyncio.create_task(self.client.get(path))
        await self._begun.acquire()
        return asked

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def _whole(self, _: Request) -> Response:
        self._begun.release()
        await self.go.wait()
        return JSONResponse("whole")

    async def _stream(self, _: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            self._begun.release()
            await self.go.wait()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _slow(self, _: Request) -> Response:
        raise TimeoutError("of the app's own")


def run(scenario: Callable[[Site], Coroutine[Any, Any, None]], **limits: int) -> None:
    async def main() -> None:
        await scenario(Site(**limits))

    asyncio.run(main())


def check(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


def test_draining_refuses_what_comes_and_leaves_what_is_there() -> None:
    async def scenario(site: Site) -> None:
        open_ = [await site.ask("/whole"), await site.ask("/stream")]
        assert site.admission.drain(60) == 2
        for path in ("/whole", "/stream", "/health", "/nowhere"):
            check(await site.client.get(path), 503, "shutting_down")
        site.go.set()
        whole, stream = await asyncio.gather(*open_)
        assert (whole.status_code, whole.json()) == (200, "whole")
        assert stream.text == "data: 1\n\ndata: [DONE]\n\n"
        assert site.admission.drain(60) == 0

    run(scenario)


def test_what_does_not_end_in_time_ends_with_an_error() -> None:
    async def scenario(site: Site) -> None:
        open_ = [await site.ask("/whole"), await site.ask("/stream")]
        site.admission.drain(0)
        whole, stream = await asyncio.gather(*open_)
        check(whole, 503, "shutting_down")
        assert stream.text.startswith('data: 1\n\ndata: {"error":{"message":')
        assert "[DONE]" not in stream.text
        assert site.admission.drain(0) == 0

    run(scenario)


def test_a_later_call_gives_no_more_time() -> None:
    async def scenario(site: Site) -> None:
        open_ = await site.ask("/whole")
        site.admission.drain(0)
        site.admission.drain(1000)
        check(await open_, 503, "shutting_down")

    run(scenario)


def test_beyond_the_limit_all_but_health_is_refused() -> None:
    async def scenario(site: Site) -> None:
        open_ = [await site.ask("/whole") for _ in range(3)]
        check(await site.client.get("/whole"), 429, "overloaded")
        assert (await site.client.get("/health")).text == "ok"
        site.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*open_)] == [200] * 3
        assert (await site.client.get("/whole")).status_code == 200, "there is room again"

    run(scenario, max_open_requests=3)


def test_a_timeout_within_the_app_is_none_of_ours() -> None:
    async def scenario(site: Site) -> None:
        assert (await site.client.get("/slow")).status_code == 500
        assert site.admission.drain(0) == 0

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ended_by_draining_frees_its_place(stream: bool) -> None:
    args = AppArgs(model="fake", max_batch_size=2, max_waiting=2)
    begun = asyncio.Event()

    class Port(InProcessPort):
        def generate(self, call: GenerateCall) -> AsyncGenerator[Reply]:
            begun.set()
            return super().generate(call)

    port = Port(args)

    async def scenario() -> None:
        admission = Admission()
        app = create_app(port, args, ApiKeys([]), admission=admission)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            port.engine.gate.clear()
            body = {"prompt": "abc", "max_tokens": 5, "stream": stream}
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            await begun.wait()
            assert port.replica._num_unfinished == 1
            admission.drain(0)
            check(await asked, 503, "shutting_down")
            assert port.replica._num_unfinished == 0

    try:
        asyncio.run(scenario())
    finally:
        port.engine.gate.set()
        port.replica._loop.stop()
