"""The closed loop asks every question once, and times what arrives."""

from __future__ import annotations

import asyncio

import pytest

from bench.clients import EngineClient, Timed
from bench.closed_loop import Level, Turn, ask_all
from bench.common import Prompt
from tests.support import engines
from tests.support.tiny_models import tiny_target
from valuspec.tree import DraftTree

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_every_question_is_asked_once_with_either_kind_of_decoding(concurrency: int) -> None:
    target = tiny_target("llama")
    prompts = [Prompt(str(n), engines.random_prompt(n, 20)) for n in range(7)]
    plain = [
        engines.plain(target, engines.request("a", p.token_ids, max_tokens=12)).token_ids
        for p in prompts
    ]
    trees = {
        p.token_ids: [DraftTree.from_paths([answer])]
        for p, answer in zip(prompts, plain, strict=True)
    }

    async def run() -> Level:
        level = Level()
        for speculative, turns in ((False, level.plain), (True, level.speculative)):
            engine = engines.engine_of(target, max_batch_size=concurrency)
            client = EngineClient(engine, 12, "default", trees if speculative else None)
            turns.append(await ask_all(client, prompts, concurrency, title=""))
        return level

    level = asyncio.run(run())
    for turn in (*level.plain, *level.speculative):
        assert [answer.token_ids for answer in turn.answers] == plain
        assert all(answer.error is None for answer in turn.answers)
        assert all(len(answer.gaps_s) == len(answer.token_ids) - 1 for answer in turn.answers)
    result = level.to_json()
    assert (result["compared"], result["identical"], result["failures"]) == (7, 7, 0)


def test_differences_and_failures_are_counted() -> None:
    answers = [[1, 2], [1, 3], [1]]
    plain = Turn(2.0, [Timed(token_ids=list(a)) for a in answers])
    other = Turn(1.0, [Timed(token_ids=[1, 2]), Timed(token_ids=[1, 2]), Timed(error="lost")])
    result = Level([plain], [other]).to_json()
    assert (result["compared"], result["identical"], result["failures"]) == (3, 1, 1)
    assert (result["plain_tok_s"], result["speculative_tok_s"]) == (2.5, 4.0)
