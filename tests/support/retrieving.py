"""A retrieval service on a real server, and requests to try it with."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from retrieval.breaker import CircuitBreaker
from retrieval.embedded import EmbeddedValkey
from retrieval.faiss_index import FaissIndex
from retrieval.namespace import namespace, tree_id
from retrieval.redis_store import RedisStore
from retrieval.service import RetrievalService, Retrieved

NS = namespace("tenant", "model", "tokenizer")
VOCAB = 50_000
# What production uses. A busy machine wakes a sleeper late; what is told apart is one deadline
# and a stalled client.
DEADLINE_S = 0.05
LATE_S = 0.5
# Where a test is about what is found, a busy machine must not make it a timeout.
PATIENCE_S = 10.0


@asynccontextmanager
async def service(url: str, **options: Any) -> AsyncIterator[RetrievalService]:
    """With production timeouts, for tests of faults."""
    made = RetrievalService(RedisStore(url), FaissIndex, vocab_size=VOCAB, **options)
    try:
        yield made
    finally:
        await made.aclose()


@asynccontextmanager
async def patient_service(url: str, **options: Any) -> AsyncIterator[RetrievalService]:
    """Without timeouts worth mentioning, for everything else."""
    store = RedisStore(url, connect_timeout_s=PATIENCE_S, read_timeout_s=PATIENCE_S)
    made = RetrievalService(store, FaissIndex, vocab_size=VOCAB, **options)
    try:
        yield made
    finally:
        await made.aclose()


def prompt(n: int) -> list[int]:
    return [1, 2, 3, 10_000 + n, 20_000 + n % 7]


def answer(n: int) -> list[int]:
    return [30_000 + n, 4, 5]


def tree_key(n: int) -> str:
    return f"vs:{{{NS}}}:tree:{tree_id(prompt(n))}"


async def store_answers(made: RetrievalService, numbers: Sequence[int]) -> None:
    for n in numbers:
        assert await made.write_back(NS, prompt(n), answer(n)) == "stored"


async def fill(valkey: EmbeddedValkey, numbers: Sequence[int]) -> None:
    async with patient_service(valkey.url) as made:
        await store_answers(made, numbers)


async def look(made: RetrievalService, n: int, k: int = 16) -> Retrieved:
    return await made.lookup(NS, prompt(n), k, deadline_s=PATIENCE_S)


async def look_briefly(made: RetrievalService, n: int) -> Retrieved:
    started = time.perf_counter()
    found = await made.lookup(NS, prompt(n), deadline_s=DEADLINE_S)
    assert time.perf_counter() - started < DEADLINE_S + LATE_S
    return found


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions are not ours to signal
            await asyncio.sleep(0.005)


async def eventually_hit(made: RetrievalService) -> None:
    async with asyncio.timeout(10):
        while (await look_briefly(made, 1)).outcome != "hit":  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)


def quick_breaker() -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=3, cooldown_s=0.1)
