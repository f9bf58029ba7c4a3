"""Blocks that run out, are shared or are given back change nothing that a client can see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.adversary import hidden_truth, random_trees
from tests.support import engines
from tests.support.engines import Result, engine_of, request, run, scripted
from tests.support.tiny_models import tiny_target
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.scheduler import MIXED_ROWS
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest
from valuspec.errors import RequestError
from valuspec.tree import DraftTree

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUT: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def plain(target: Target, r: GenerationRequest) -> Result:
    engine = engine_of(target, max_batch_size=1, reuse_prefixes=False)
    return run(engine, [r])[r.request_id]


def cached(result: Result) -> int:
    assert result.stats is not None
    return result.stats.num_cached_tokens


def test_prompts_that_begin_alike_are_computed_once(target: Target) -> None:
    """Another question over the same schema, the same prompt again, and the next turn of a chat."""
    schema = engines.random_prompt(1, 2 * BLOCK)
    first = request("first", (*schema, 3, 4, 5), **OUTPUT)
    engine = engine_of(target, max_batch_size=1)
    answer = run(engine, [first])["first"]
    follow_up = (*first.prompt_ids, *answer.token_ids, *engines.random_prompt(2, BLOCK))
    for name, prompt, expected in [
        ("other question", (*schema, 9, 9), 2 * BLOCK),
        ("the prompt again", first.prompt_ids, 2 * BLOCK),
        ("the schema alone", schema, 2 * BLOCK - 1),  # its last token's logits are wanted
        ("less of the schema", (*schema[: BLOCK + 50], 9, 9), BLOCK + 50),
        ("next turn", follow_up, 2 * BLOCK + 42),  # the last output token is not in the cache
        ("next turn again", follow_up, 3 * BLOCK + 42),
        ("too little to copy", (*schema[:7], 9, 9), 0),
        ("another beginning", (7, *schema[1:], 9, 9), 0),
    ]:
        r = request(name, prompt, **OUTPUT)
        result = run(engine, [r])[name]
        assert cached(result) == expected, name
        assert result.visible == plain(target, r).visible, name


def test_prompts_computed_at_the_same_time_are_shared_afterwards(target: Target) -> None:
    schema = engines.random_prompt(3, BLOCK)
    requests = [request(str(i), (*schema, i, i + 1), **OUTPUT) for i in range(6)]
    engine = engine_of(target, max_batch_size=2)
    results = run(engine, requests)
    assert [cached(results[str(i)]) for i in range(6)] == [0, 0] + 4 * [BLOCK]
    for r in requests:
        assert results[r.request_id].visible == plain(target, r).visible


@pytest.mark.parametrize("length", [8, BLOCK - 1, BLOCK + 60])
def test_a_beginning_that_fills_no_block_is_copied(target: Target, length: int) -> None:
    beginning = engines.random_prompt(21, length)
    requests = [request(str(i), (*beginning, i, i + 1, i + 2), **OUTPUT) for i in range(5)]
    engine = engine_of(target, max_batch_size=2)
    results = run(engine, requests)
    assert [cached(results[str(i)]) for i in range(5)] == [0, 0] + 3 * [length]
    for r in requests:
        assert results[r.request_id].visible == plain(target, r).visible


def test_a_copy_that_fails_leaves_nothing_behind(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block, and no tokens that others would take for computed ones."""
    beginning = engines.random_prompt(22, BLOCK - 20)
    first, second, third = (request(str(i), (*beginning, i, i), **OUTPUT) for i in range(3))
    engine = engine_of(target, max_batch_size=1)
    run(engine, [first])

    def fails(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(engine._cache, "move", fails)
        engine.add(second)
        with pytest.raises(MemoryError):
            engine.step()
    engine.cancel("1")
    assert engine.pool.num_available == engine.pool.num_blocks
    assert run(engine, [third])["2"].visible == plain(target, third).visible


def test_tenants_share_nothing(target: Target) -> None:
    prompt = engines.random_prompt(4, 2 * BLOCK + 5)
    engine = engine_of(target, max_batch_size=1)
    for name, space, expected in [("a", "A", 0), ("b", "B", 0), ("c", "A", 2 * BLOCK)]:
        r = replace(request(name, prompt, **OUTPUT), namespace=space)
        assert cached(run(engine, [r])[name]) == expected


def test_a_long_prompt_does_not_stall_a_stream(target: Target) -> None:
    stream = request("stream", engines.random_prompt(5, 10), max_tokens=40, ignore_eos=True)
    long = request("long", engines.random_prompt(6, 6 * MIXED_ROWS), **OUTPUT)
    engine = engine_of(target, max_batch_size=2)
    engine.add(stream)
    engine.step()
    engine.add(long)
    results = {"stream": Result(), "long": Result()}
    steps_before_long = 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            results[output.request_id].add(output)
        if not results["long"].token_ids:
            steps_before_long += 1
            assert [output.request_id for output in outputs] == ["stream"]
    assert steps_before_long >= 5
    assert results["long"].visible == plain(target, long).visible


@pytest.mark.parametrize("num_blocks", [4, 7])
def test_preempted_requests_give_the_same_output(target: Target, num_blocks: int) -> None:
    """Six streams that outgrow the cache together; the youngest give way, and nothing is lost."""
    requests = [
        request(str(i), engines.random_prompt(10 + i, length), max_tokens=100, ignore_eos=True)
        for i, length in enumerate([20, BLOCK - 20, 60, 5, 50, BLOCK + 10])
    ]
    expected = {r.request_id: plain(target, r) for r in requests}
    futures = {r.prompt_ids: expected[r.request_id].token_ids for r in requests}
    engine = engine_of(
        target,
        scripted(target, futures, hidden_truth, random_trees),
        max_batch_size=6,
        kv_tokens=num_blocks * BLOCK,
    )
    results = run(engine, requests)
    assert sum(r.stats.num_preemptions for r in results.values() if r.stats) > 0
    assert engine.pool.num_available == engine.pool.num_blocks
    for r in requests:
        assert results[r.request_id].visible == expected[r.request_id].visible


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(target: Target) -> None:
    engine = engine_of(target, kv_tokens=2 * BLOCK)
    with pytest.raises(RequestError, match=f"cache of this server holds {2 * BLOCK}") as refused:
        engine.add(request("a", engines.random_prompt(1, BLOCK), max_tokens=BLOCK))
    assert refused.value.code == "context_length_exceeded"
    engine.add(request("b", engines.random_prompt(1, BLOCK), max_tokens=BLOCK - 70))


@pytest.mark.parametrize("length", [BLOCK - 9, BLOCK - 4, BLOCK - 1])
def test_an_accepted_run_that_ends_early_may_cross_a_block(target: Target, length: int) -> None:
    """The cache holds more tokens than the output then; only the output's may be shared."""
    prompt = engines.random_prompt(7, length)
    future = plain(target, request("a", prompt, **OUTPUT)).token_ids
    stop = next(i for i in range(1, len(future)) if future[i] not in future[:i])
    r = request("a", prompt, stop_token_ids=(future[stop],), **OUTPUT)
    chain = DraftTree.from_lists(future[1:16], list(range(-1, 14)))
    engine = engine_of(target, scripted(target, {}, engines.fixed(chain)), max_batch_size=1)
    expected = plain(target, r)
    for name in ("first", "again"):
        result = run(engine, [replace(r, request_id=name)])[name]
        assert result.visible == expected.visible
    assert result.num_accepted > stop


def test_nothing_leaks_over_a_random_history(target: Target) -> None:
    """200 requests, many alike, that come, are cancelled, are preempted and end."""
    rng = np.random.default_rng(0)
    beginnings = [engines.random_prompt(i, n) for i, n in enumerate([BLOCK, 2 * BLOCK, 30])]
    engine = engine_of(target, max_batch_size=5, kv_tokens=9 * BLOCK)
    live: set[str] = set()
    number = 0
    while number < 200 or engine.has_work:
        if number < 200 and engine.num_waiting < 3:
            tail = rng.integers(0, 200, rng.integers(1, 40)).tolist()
            prompt = (*beginnings[number % 3], *tail)
            engine.add(request(str(number), prompt, max_tokens=int(rng.integers(1, 60))))
            live.add(str(number))
            number += 1
        for output in engine.step():
            if output.finish_reason is not None:
                live.discard(output.request_id)
        if live and rng.random() < 0.15:
            gone = sorted(live)[int(rng.integers(len(live)))]
            engine.cancel(gone)
            live.discard(gone)
        used = {block for sequence in engine._running for block in sequence.blocks}
        assert engine.pool.num_available == engine.pool.num_blocks - len(used)
    assert not live
    assert engine.pool.num_available == engine.pool.num_blocks
    assert sorted(engine._places.free) == list(range(5))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.fault(18)
def test_a_resumed_request_goes_on_with_the_same_bytes(target: Target, sampled: bool) -> None:
    """Another engine takes over behind any number of tokens: within a character, in what may
    become a stop string, on both sides of a block's edge."""
    params = OUTPUT | ({"temperature": 0.9, "seed": 5, "top_p": 0.95} if sampled else {})
    prompt = engines.random_prompt(9, 2 * BLOCK - 7)
    text = plain(target, request("r", prompt, **params)).text
    r = request("r", prompt, stop=(text[9:11] + "never there",), **params)
    engine = engine_of(target, max_batch_size=1)
    engine.add(r)
    whole, texts = Result(), {0: ""}  # number of tokens -> text settled by then
    while engine.has_work:
        for step in engine.step():
            whole.add(step)
            texts[len(whole.token_ids)] = whole.text
    assert whole.visible == plain(target, r).visible
    drafter = scripted(target, {prompt: whole.token_ids}, hidden_truth, random_trees)
    engine = engine_of(target, drafter, max_batch_size=1)
    num_accepted = 0
    for done in sorted(set(texts) - {len(whole.token_ids)}):
        resumed = replace(r, resumed_ids=tuple(whole.token_ids[:done]))
        rest = run(engine, [resumed])["r"]
        assert whole.token_ids[:done] + rest.token_ids == whole.token_ids
        assert texts[done] + rest.text == whole.text
        assert rest.finish_reason == whole.finish_reason
        assert rest.stats is not None
        assert rest.stats.num_output_tokens == len(whole.token_ids) - done
        assert rest.stats.num_cached_tokens <= len(prompt)
        num_accepted += rest.num_accepted
    assert num_accepted > 100  # drafts follow what was resumed


@pytest.mark.parametrize("resumed", [(1,) * 40, (-1,), (320,)], ids=["all", "negative", "foreign"])
def test_what_cannot_be_resumed_is_refused(target: Target, resumed: tuple[int, ...]) -> None:
    engine = engine_of(target, max_batch_size=1)
    with pytest.raises(RequestError, match="resumed"):
        engine.add(replace(request("r", (1, 2), **OUTPUT), resumed_ids=resumed))
