"""Two ways to ask for an answer and time its tokens: over HTTP, and an engine in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from valuspec.engine.engine import Engine
from valuspec.engine.types import GenerationRequest, SamplingParams, StepOutput
from valuspec.tree import DraftTree


@dataclass(slots=True)
class Timed:
    """One answer. Times are seconds; an answer with an `error` counts as failed."""

    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between arrivals; tokens that arrive together wait zero for each other."""
    error: str | None = None
    _started: float = field(default_factory=time.perf_counter)
    _last: float = 0.0

    def arrived(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        now = time.perf_counter()
        if self.token_ids:
            self.gaps_s += [now - self._last, *[0.0] * (len(token_ids) - 1)]
        else:
            self.first_token_s = now - self._started
        self._last = now
        self.token_ids += token_ids


class Client(Protocol):
    async def ask(self, prompt_ids: Sequence[int]) -> Timed:
        """Greedy answer to a prompt; never raises for a failed request."""
        ...


#: How a client asks a server of this project. Plain requests use a cache of their own, so that
#: neither kind finds what the other left behind.
SPECULATIVE: Mapping[str, Any] = {"speculative": {"enabled": True}}
PLAIN: Mapping[str, Any] = {"speculative": {"enabled": False}, "cache_salt": "plain"}


class HttpClient:
    """A server with OpenAI's completions route that takes and returns token ids.

    fields: of every request, besides the usual ones
    """

    def __init__(
        self, url: str, max_tokens: int, fields: Mapping[str, Any], api_key: str = "none"
    ) -> None:
        self._body = {
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=256),
        )

    async def ask(self, prompt_ids: Sequence[int]) -> Timed:
        body = self._body | {"prompt": list(prompt_ids)}
        answer = Timed()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    answer.error = f"status {response.status_code}"
                    return answer
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return answer
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            answer.error = event["error"]["message"]
                            return answer
                        for choice in event["choices"]:
                            answer.arrived(choice.get("token_ids") or [])
            answer.error = "the stream ended without [DONE]"
        except httpx.HTTPError as error:
            answer.error = repr(error)
        return answer

    async def aclose(self) -> None:
        await self._http.aclose()


class EngineClient:
    """An engine that takes its steps between the events of this thread's event loop.

    Not on a thread of its own: the target has computed in this one already, and OpenMP's workers
    of two threads disturb each other (`deployments.engine_loop`).

    trees: retrieved ones, by prompt; None for plain decoding
    """

    def __init__(
        self,
        engine: Engine,
        max_tokens: int,
        namespace: str,
        trees: Mapping[tuple[int, ...], Sequence[DraftTree]] | None,
    ) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._namespace = namespace
        self._trees = trees
        self._outputs: dict[str, asyncio.Queue[StepOutput]] = {}
        self._count = 0
        self._stepping: asyncio.Task[None] | None = None

    async def ask(self, prompt_ids: Sequence[int]) -> Timed:
        self._count += 1
        request = GenerationRequest(
            request_id=str(self._count),
            prompt_ids=tuple(prompt_ids),
            params=SamplingParams(max_tokens=self._max_tokens, speculative=self._trees is not None),
            namespace=self._namespace,
        )
        outputs = self._outputs[request.request_id] = asyncio.Queue()
        answer = Timed()
        self._engine.add(request)
        if self._trees is not None:
            trees = list(self._trees.get(request.prompt_ids, ()))
            self._engine.attach_retrieved(request.request_id, trees)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        while True:
            output = await outputs.get()
            answer.arrived(output.token_ids)
            if output.finish_reason is not None:
                answer.error = output.error
                return answer

    async def _step(self) -> None:
        while self._engine.has_work:
            for output in self._engine.step():
                self._outputs[output.request_id].put_nowait(output)
            await asyncio.sleep(0)
