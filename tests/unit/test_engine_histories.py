"""Engines over random histories: requests come, share, are preempted, are cancelled and end.

Checked after every step: no place and no block is lost, and none is held twice. At the end:
everybody who stayed got through with the answer that was known beforehand.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.adversary import ScriptedDrafter, hidden_truth, random_trees
from tests.support.engines import Result, engine_of, request
from tests.support.histories import num_histories
from tests.support.ledger_target import LedgerTarget, continuation
from valuspec.engine.engine import Engine
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.proposal import MAX_TREE_NODES

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_OUTPUT = 150
#: Blocks of tokens that prompts are made of.
A, B = (tuple(np.random.default_rng(n).integers(0, 96, BLOCK).tolist()) for n in (1, 2))


@dataclass(frozen=True)
class Client:
    """A request.

    arrival: step before which it comes; leaves: so many steps later, None for staying
    """

    arrival: int
    prompt: tuple[int, ...]
    output: int
    speculative: bool
    leaves: int | None


# Few different prompts, so that all kinds of beginnings are shared, and whole prompts repeat.
prompts = st.builds(
    lambda blocks, tail: (*itertools.chain(*blocks), *A[:tail]) or A[:1],
    st.lists(st.sampled_from([A, B]), max_size=2),
    st.sampled_from([0, 0, 1, 50, 100, BLOCK - 1]),
)
clients = st.builds(
    Client,
    arrival=st.integers(0, 60),
    prompt=prompts,
    output=st.integers(1, MAX_OUTPUT) | st.just(MAX_OUTPUT),
    speculative=st.booleans(),
    leaves=st.none() | st.none() | st.integers(0, 20),
)


def blocks_for(client: Client) -> int:
    return -(-(len(client.prompt) + client.output + 1 + MAX_TREE_NODES) // BLOCK)


@settings(max_examples=num_histories(60), deadline=None)
@given(
    history=st.lists(clients, min_size=1, max_size=12) | st.lists(clients, min_size=8, max_size=12),
    num_places=st.integers(1, 5) | st.just(5),
    spare=st.integers(0, 3),
    envelope=st.sampled_from([None, None, 32]),
    reuse_prefixes=st.booleans() | st.just(True),
    seed=st.integers(0, 99),
)
def test_random_histories(
    history: list[Client],
    num_places: int,
    spare: int,
    envelope: int | None,
    reuse_prefixes: bool,
    seed: int,
) -> None:
    """With barely enough blocks for the largest request, or a few more."""
    target: Any = LedgerTarget(envelope)
    answers = {c.prompt: continuation(c.prompt, MAX_OUTPUT) for c in history}
    engine = engine_of(
        target,
        ScriptedDrafter((hidden_truth, random_trees), target.vocab_size, answers, seed),
        max_batch_size=num_places,
        kv_tokens=BLOCK * (spare + max(map(blocks_for, history))),
        reuse_prefixes=reuse_prefixes,
    )
    for client, result in zip(history, run(engine, history), strict=True):
        answer = answers[client.prompt][: client.output]
        if result.finish_reason is None:
            assert client.leaves is not None, "somebody who stayed got no answer"
            answer = answer[: len(result.token_ids)]
        assert result.token_ids == answer


def run(engine: Engine, history: list[Client]) -> list[Result]:
    results = [Result() for _ in history]
    ranks = {str(number): c.arrival for number, c in enumerate(history)}
    step = 0
    while engine.has_work or step <= max(c.arrival for c in history):
        for number, client in enumerate(history):
            if client.arrival == step:
                params = {"max_tokens": client.output, "speculative": client.speculative}
                engine.add(request(str(number), client.prompt, **params))
            if client.leaves is not None and client.arrival + client.leaves == step:
                engine.cancel(str(number))
        for output in engine.step():
            results[int(output.request_id)].add(output)
        check_books(engine)
        in_line = [ranks[s.request.request_id] for s in (*engine._running, *engine._waiting)]
        assert in_line == sorted(in_line), "somebody was overtaken"
        step += 1
        assert step < 5000, "somebody waits for ever"
    assert engine.pool.num_available == engine.pool.num_blocks
    return results


def check_books(engine: Engine) -> None:
    """Places and blocks, counted anew from what each sequence holds."""
    places = [s.place for s in engine._running]
    assert sorted(places + engine._places.free) == list(range(engine.max_batch_size))
    held = [block for s in engine._running for block in s.blocks]
    for s in engine._running:
        assert len(set(s.blocks)) == len(s.blocks)
        assert engine._cache.tables[s.place, : len(s.blocks)].tolist() == s.blocks
    for block in range(engine.pool.num_blocks):
        assert engine.pool.num_users(block) == held.count(block)
    assert engine.pool.num_available == engine.pool.num_blocks - len(set(held))
    assert all(s.place < 0 and not s.blocks for s in engine._waiting)
