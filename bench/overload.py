"""What a service does when ten times as much is asked of it as it can do.

    python -m bench.overload --requests F.jsonl [--seconds 120] [--factor 10] [--url URL]

1. capacity: a closed loop with more clients than the batch has places
2. flood: for --seconds, questions arrive at random times at --factor times that rate, whether or
   not earlier ones have been answered
3. recovery: from the last arrival until a new question is answered as soon as in an idle app

Goodput counts whole answers only. Some questions are asked before the flood and again after it, and
must get the same tokens. Without --url the app is started for it, and the memory of its processes
is watched.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench import common
from bench.own_app import OwnApp, own_app
from valuspec.errors import ValuSpecError

#: Share of a phase that is not counted: the app fills up first.
LEAD_IN = 0.15
#: Questions asked before the flood and after it.
CHECKED = 4


@dataclass(slots=True)
class Reply:
    """What became of one question. Times are seconds on the monotonic clock.

    status: of HTTP; 0 when the connection failed
    """

    sent: float
    ended: float = 0.0
    status: int = 0
    retry_after: str | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended - self.sent


class Asker:
    """Asks the questions of a file, over and over."""

    def __init__(self, http: httpx.AsyncClient, questions: Sequence[str], max_tokens: int) -> None:
        self._http = http
        self._questions = itertools.cycle(questions)
        self._max_tokens = max_tokens

    async def ask(self, question: str | None = None) -> Reply:
        """Never raises for a failed request."""
        content = next(self._questions) if question is None else question
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        reply = Reply(time.monotonic())
        try:
            response = await self._http.post("/v1/chat/completions", json=body)
            reply.status = response.status_code
            reply.retry_after = response.headers.get("retry-after")
            if reply.status == 200:
                reply.token_ids = response.json()["choices"][0]["token_ids"]
        except httpx.HTTPError as error:
            print(f"overload: {error!r}", file=sys.stderr)
        reply.ended = time.monotonic()
        return reply


Ask = Callable[[], Coroutine[Any, Any, Reply]]


async def closed_loop(ask: Ask, num_clients: int, seconds: float) -> list[Reply]:
    end = time.monotonic() + seconds
    replies: list[Reply] = []

    async def one_client() -> None:
        while time.monotonic() < end:
            replies.append(await ask())

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return replies


async def open_loop(ask: Ask, rate: float, seconds: float, seed: int = 0) -> list[Reply]:
    """`rate` questions a second, at random times; returns when all have been answered."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds))
    begin = time.monotonic()
    asked: list[asyncio.Task[Reply]] = []
    for at in begin + np.cumsum(gaps):
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        asked.append(asyncio.create_task(ask()))
    return await asyncio.gather(*asked)


def per_second(replies: Sequence[Reply], begin: float, end: float) -> tuple[float, float]:
    """Answers and tokens a second of the answers that ended in a phase, its beginning left out."""
    begin += LEAD_IN * (end - begin)
    whole = [r for r in replies if r.status == 200 and begin <= r.ended <= end]
    return len(whole) / (end - begin), sum(len(r.token_ids) for r in whole) / (end - begin)


async def recovery_s(asker: Asker, question: str, idle_s: float) -> float:
    """Seconds until `question` takes no more than twice as long as it did in an idle app."""
    begin = time.monotonic()
    while True:
        sent = time.monotonic()
        reply = await asker.ask(question)
        if reply.status == 200 and reply.seconds < 2 * idle_s:
            return sent - begin
        await asyncio.sleep(0.25)


@asynccontextmanager
async def memory_watched(app: OwnApp | None) -> AsyncIterator[list[float]]:
    """Yields a list that gets the memory of the app's processes, in MB, every second."""
    samples: list[float] = []

    async def watch() -> None:
        while app is not None:
            samples.append(app.memory_mb())
            await asyncio.sleep(1)

    task = asyncio.create_task(watch())
    try:
        yield samples
    finally:
        task.cancel()


async def measure(args: argparse.Namespace, url: str, app: OwnApp | None) -> dict[str, Any]:
    questions = [json.loads(line)["turns"][0] for line in args.requests.open(encoding="utf-8")]
    key = os.environ.get("VALUSPEC_API_KEY", "none")
    async with httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(600, connect=30),
        limits=httpx.Limits(max_connections=None),
    ) as http:
        asker = Asker(http, questions, args.max_tokens)
        checked = questions[:CHECKED]
        await asker.ask(checked[0])
        before = [await asker.ask(q) for q in checked]
        begin = time.monotonic()
        replies = await closed_loop(asker.ask, 2 * args.max_batch_size, args.capacity_seconds)
        requests_s, capacity = per_second(replies, begin, begin + args.capacity_seconds)
        if not requests_s:
            raise ValuSpecError("no answer within --capacity-seconds")
        async with memory_watched(app) as memory:
            begin = time.monotonic()
            flood = asyncio.create_task(
                open_loop(asker.ask, args.factor * requests_s, args.seconds)
            )
            await asyncio.sleep(args.seconds)
            recovered = await recovery_s(asker, checked[0], before[0].seconds)
            replies = await flood
        after = [await asker.ask(q) for q in checked]
    _, goodput = per_second(replies, begin, begin + args.seconds)
    refused = [r for r in replies if r.status == 429]
    waits = [r.seconds for r in refused] or [0.0]
    return {
        "capacity_tok_s": capacity,
        "goodput_tok_s": goodput,
        "goodput_share": goodput / capacity,
        "arrivals": len(replies),
        "answered": sum(r.status == 200 for r in replies),
        "refused": len(refused),
        "refused_without_retry_after": sum(r.retry_after is None for r in refused),
        "refused_p50_ms": 1e3 * float(np.percentile(waits, 50)),
        "refused_p99_ms": 1e3 * float(np.percentile(waits, 99)),
        "failures": sum(r.status not in (200, 429) for r in replies),
        "recovery_s": recovered,
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(before, after, strict=True)),
        "compared": CHECKED,
        "memory_mb": {"before": memory[0], "peak": max(memory), "after": memory[-1]}
        if memory
        else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        result = _run(args)
    except (ValuSpecError, OSError) as error:
        print(f"overload: {error}", file=sys.stderr)
        return 2
    memory = result["memory_mb"] or {}
    rows = [(name, value) for name, value in result.items() if name != "memory_mb"]
    rows += [(f"memory {name}, MB", value) for name, value in memory.items()]
    common.print_table(("what", "measured"), rows)
    settings = {name: str(value) for name, value in vars(args).items()}
    common.print_json({**result, "settings": settings, "environment": common.environment()})
    bad = result["failures"] + result["refused_without_retry_after"]
    return 0 if not bad and result["identical"] == result["compared"] else 1


def _run(args: argparse.Namespace) -> dict[str, Any]:
    if args.url is not None:
        return asyncio.run(measure(args, args.url, None))
    options = ["--model", args.model, "--kv-cache-tokens", str(args.kv_cache_tokens)]
    options += ["--max-batch-size", str(args.max_batch_size)]
    with own_app(*options, "--max-waiting", str(args.max_waiting)) as app:
        return asyncio.run(measure(args, app.url, app))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=Path, required=True, help="questions, JSON lines")
    parser.add_argument("--url", help="a running app (one is started when absent)")
    parser.add_argument("--seconds", type=float, default=120, help="of the flood")
    parser.add_argument("--factor", type=float, default=10, help="arrivals per capacity")
    parser.add_argument("--capacity-seconds", type=float, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-batch-size", type=int, default=8, help="of the app")
    parser.add_argument("--max-waiting", type=int, default=16, help="of an app of its own")
    parser.add_argument(
        "--kv-cache-tokens",
        type=int,
        default=16384,
        help="of an app of its own: full before the flood, so that what grows then is a leak",
    )
    parser.add_argument("--model", default="smollm2", help="of an app of its own")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
