"""1,000 requests over real connections, many of whose clients go away at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deployments.settings import AppArgs
from tests.support import engines
from tests.support.fake_port import InboxPort
from tests.support.http_app import Connection, assert_idle, serving
from tests.support.tiny_models import tiny_target
from valuspec.drafting.drafter import Drafter
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.target import Target
from valuspec.tree import DraftTree

ARGS = AppArgs(model="tiny", max_batch_size=6, max_waiting=64)
NUM_REQUESTS = 1000
NUM_CLIENTS = 24
MAX_TOKENS = 12
PROMPTS = tuple(engines.random_prompt(n, 6 + 5 * (n % 20)) for n in range(40))


class SlowDrafts:
    """Stands for DraftStore: finds the right answer for each prompt, after a while."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.num_open = 0

    async def lookup(self, owner: object, prompt_ids: tuple[int, ...], report: object) -> list:
        self.num_open += 1
        try:
            await asyncio.sleep(0.002 * (len(prompt_ids) % 7))
            return [DraftTree.from_paths([self.answers[prompt_ids]])]
        finally:
            self.num_open -= 1

    def write_back(self, *_: object) -> None:
        return


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def target(one_thread: None) -> Target:
    return tiny_target("llama")


def test_a_thousand_requests_with_disconnects_leave_nothing_and_cross_nothing(
    target: Target,
) -> None:
    answers = {
        p: engines.plain(target, engines.request("plain", p, max_tokens=MAX_TOKENS)).token_ids
        for p in PROMPTS
    }
    # Room for four of the six that may run: some are preempted beside everything else.
    engine = engines.engine_of(
        target, Drafter(), max_batch_size=ARGS.max_batch_size, kv_tokens=8 * BLOCK
    )
    port = InboxPort(ARGS, engine)
    drafts = port.replica._drafts = SlowDrafts(answers)
    with serving(port, ARGS) as address:
        whole = asyncio.run(ask_all(address, answers))
        # What the last ones who left had begun ends within a few steps; nothing tells when.
        open_work = (lambda: port.replica._num_unfinished, lambda: drafts.num_open)
        asyncio.run(until(lambda: not engine.has_work and not any(f() for f in open_work)))
        stats = asyncio.run(port.replica.stats())
    assert NUM_REQUESTS * 0.3 < whole < NUM_REQUESTS * 0.7
    assert stats["totals"]["valuspec_request_success_abort"] > NUM_REQUESTS / 20
    assert_idle(port)
    port.replica._loop.stop()


async def ask_all(address: tuple[str, int], answers: dict[tuple[int, ...], list[int]]) -> int:
    """Number of clients that stayed to the end, all of whom got their answer."""
    rng = np.random.default_rng(0)
    numbers = iter(range(NUM_REQUESTS))
    whole = 0

    async def one_client() -> None:
        nonlocal whole
        for number in numbers:
            prompt = PROMPTS[number % len(PROMPTS)]
            stays = await ask(address, f"r{number}", prompt, answers[prompt], rng)
            whole += stays

    await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))
    return whole


async def ask(
    address: tuple[str, int],
    request_id: str,
    prompt: tuple[int, ...],
    answer: list[int],
    rng: np.random.Generator,
) -> bool:
    """Ask, and go away at a random moment or not at all. True when the whole answer came."""
    leaves = rng.choice(["never", "in its request", "at once", "soon", "in the answer"],
                        p=[0.5, 0.05, 0.1, 0.15, 0.2])  # fmt: skip
    body = {
        "prompt": list(prompt),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "speculative": {"enabled": bool(rng.random() < 0.8)},
    }
    async with Connection.to(address) as connection:
        connection.send(body, request_id, share=0.9 if leaves == "in its request" else 1.0)
        if leaves == "soon":
            await asyncio.sleep(0.02 * rng.random())
        if leaves in ("in its request", "at once", "soon"):
            await connection.writer.drain()
            return False
        response = await connection.response()
        assert response.status == 200
        events = 1 + rng.integers(4) if leaves == "in the answer" else NUM_REQUESTS
        while events and await response.event():
            events -= 1
    assert response.ids <= {f"cmpl-{request_id}"}, "a chunk of somebody else's"
    assert response.token_ids == answer[: len(response.token_ids)]
    if leaves == "never":
        assert response.done
        assert response.token_ids == answer
    return bool(response.done)


async def until(holds) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
