"""Whatever is drafted and whoever shares the batch, the output is that of plain decoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from bench.adversary import (
    Adversary,
    ScriptedDrafter,
    hidden_truth,
    keep_all,
    random_trees,
    wrong_trees,
)
from tests.support import engines
from tests.support.engines import Result, engine_of, request, run, scripted
from tests.support.tiny_models import EOS, VOCAB, tiny_model, tiny_target, wrap
from valuspec.drafting.drafter import Drafter
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.proposal import MAX_TREE_NODES, keep_by_value
from valuspec.engine.rows import Rows
from valuspec.engine.target import Target
from valuspec.engine.two_zone import TwoZoneAttention
from valuspec.engine.types import GenerationRequest
from valuspec.errors import RequestError
from valuspec.tree import DraftTree

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 40
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
SEEDED = GREEDY | {"temperature": 0.8, "top_p": 0.95, "seed": 5}


@cache
def target() -> Target:
    return tiny_target("llama")


@cache
def case(seed: int, length: int, greedy: bool = True) -> tuple[GenerationRequest, Result]:
    """A request and its plain output."""
    params = GREEDY if greedy else SEEDED
    r = request(f"{seed}-{length}", engines.random_prompt(seed, length), **params)
    return r, engines.plain(target(), r)


def deepest(rng: Any, future: Sequence[int], vocab: int, nodes: int, depth: int) -> DraftTree:
    """A chain as deep as allowed, right to the end."""
    chain = list(future[:depth])
    return DraftTree.from_lists(chain, list(range(-1, len(chain) - 1)))


def widest(rng: Any, future: Sequence[int], vocab: int, nodes: int, depth: int) -> DraftTree:
    """All nodes under the context, the right one last."""
    tokens = rng.integers(0, vocab, nodes).tolist()
    tokens[-1] = future[0] if future else tokens[-1]
    return DraftTree.from_lists(tokens, [-1] * nodes)


def twins(rng: Any, future: Sequence[int], vocab: int, nodes: int, depth: int) -> DraftTree:
    """The right continuation several times over, token by token under the same parents."""
    tokens: list[int] = []
    parents: list[int] = []
    above = [-1]
    for token in future[: min(depth, 5)]:
        level = [(parent, copy) for parent in above for copy in range(2)]
        first = len(tokens)
        tokens += [token] * len(level)
        parents += [parent for parent, _ in level]
        above = list(range(first, len(tokens)))
    return DraftTree.from_lists(tokens[:nodes], parents[:nodes])


def backwards(rng: Any, future: Sequence[int], vocab: int, nodes: int, depth: int) -> DraftTree:
    """The right path at the end of the tree, so that every accepted row has to move."""
    path = list(future[:depth])
    noise = rng.integers(0, vocab, nodes - len(path)).tolist()
    parents = [-1] * len(noise) + [-1, *range(len(noise), nodes - 1)]
    return DraftTree.from_lists([*noise, *path], parents[:nodes])


ADVERSARIES: dict[str, Adversary] = {
    "random": random_trees,
    "wrong": wrong_trees,
    "truth": hidden_truth,
    "deepest": deepest,
    "widest": widest,
    "twins": twins,
    "backwards": backwards,
}


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("adversary", ADVERSARIES.values(), ids=ADVERSARIES.keys())
@pytest.mark.fault(12)
def test_output_does_not_depend_on_the_drafts(adversary: Adversary, greedy: bool) -> None:
    cases = [case(seed, length, greedy) for seed, length in ((1, 5), (2, 30), (3, BLOCK - 12))]
    futures = {r.prompt_ids: result.token_ids for r, result in cases}
    engine = engine_of(target(), scripted(target(), futures, adversary), max_batch_size=1)
    results = run(engine, [r for r, _ in cases])
    accepted = 0
    for r, expected in cases:
        assert results[r.request_id].visible == expected.visible
        accepted += results[r.request_id].num_accepted
    if adversary in (deepest, backwards, hidden_truth):
        assert accepted > NUM_TOKENS, "the right drafts were not taken"
    if adversary is wrong_trees:
        assert accepted == 0


def test_deepest_drafts_take_the_fewest_steps() -> None:
    r, expected = case(1, 5)
    futures = {r.prompt_ids: expected.token_ids}
    engine = engine_of(target(), scripted(target(), futures, deepest))
    stats = run(engine, [r])[r.request_id].stats
    assert stats is not None
    # Prefill gives the first token; every step 15 accepted ones and a bonus.
    assert stats.num_steps == -(-(NUM_TOKENS - 1) // 16)
    assert stats.acceptance_histogram[15] == 2
    assert stats.num_accepted_tokens + stats.num_steps == NUM_TOKENS - 1
    assert stats.num_output_tokens == NUM_TOKENS
    assert stats.num_draft_tokens == stats.num_offered_nodes == stats.num_accepted_tokens


@pytest.mark.parametrize("batch_size", [2, 5, 8])
def test_batches_with_requests_joining_and_leaving(batch_size: int) -> None:
    rng = np.random.default_rng(batch_size)
    lengths = [3, 20, BLOCK - 20, 40, BLOCK + 60, 7, 90, 2 * BLOCK - 8, 16, 17]
    cases = [case(i, length, greedy=i % 3 != 0) for i, length in enumerate(lengths)]
    futures = {r.prompt_ids: result.token_ids for r, result in cases}
    drafter = scripted(target(), futures, hidden_truth, random_trees, wrong_trees, twins)
    engine = engine_of(target(), drafter, max_batch_size=batch_size)
    waiting = [r for r, _ in cases]
    results = {r.request_id: Result() for r in waiting}
    largest = 0
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop(0))
        if engine.has_work:
            for step in engine.step():
                results[step.request_id].add(step)
        largest = max(largest, engine.num_running)
    assert largest > 1
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    for r, expected in cases:
        assert results[r.request_id].visible == expected.visible


def test_every_step_is_recorded() -> None:
    futures, requests = {}, []
    for seed in range(3):
        r, truth = case(seed, 20)
        futures[r.prompt_ids] = truth.token_ids
        requests.append(r)
    drafter = scripted(target(), futures, hidden_truth)
    results = run(engine_of(target(), drafter, max_batch_size=2), requests)
    for result in results.values():
        stats = result.stats
        assert stats is not None
        assert len(stats.kept) == len(stats.accepted) == len(stats.batch_size) == stats.num_steps
        assert sum(stats.kept) == stats.num_draft_tokens > 0
        assert sum(stats.accepted) == stats.num_accepted_tokens > 0
        assert [stats.accepted.count(k) for k in range(17)] == stats.acceptance_histogram
        reached = 1 + stats.num_accepted_tokens + stats.num_steps  # perhaps past the end
        assert reached - stats.accepted[-1] <= stats.num_output_tokens <= reached
    shared = [result.stats.batch_size for result in results.values()]
    assert shared[0][0] == 2, "two short prompts are computed in one step"
    assert {size for sizes in shared for size in sizes} == {1, 2}
    assert sum(sizes.count(2) for sizes in shared) % 2 == 0, "both take part in a shared forward"


def test_cancelled_requests_leave_the_others_alone() -> None:
    """Cancel at the front, in the middle and at the end of the batch, and a waiting one."""
    cases = [case(seed, length) for seed, length in ((1, 5), (2, 30), (3, BLOCK - 12), (4, 60))]
    for victim, (gone, _) in enumerate(cases[:3]):
        futures = {r.prompt_ids: result.token_ids for r, result in cases}
        drafter = scripted(target(), futures, hidden_truth, seed=victim)
        engine = engine_of(target(), drafter, max_batch_size=3)
        results = {r.request_id: Result() for r, _ in cases}
        for r, _ in cases:
            engine.add(r)
        while engine.has_work:
            for step in engine.step():
                results[step.request_id].add(step)
            if len(results[gone.request_id].token_ids) > 4:
                engine.cancel(gone.request_id)
                assert engine.num_running + engine.num_waiting < 4
        for r, expected in cases:
            if r is not gone:
                assert results[r.request_id].visible == expected.visible
        assert results[gone.request_id].finish_reason is None


def test_cancel_before_admission_and_of_unknown_requests() -> None:
    r, expected = case(1, 5)
    engine = engine_of(target(), max_batch_size=1)
    engine.add(r)
    engine.add(request("waiting", (1, 2), max_tokens=3))
    engine.cancel("waiting")
    engine.cancel("nobody")
    engine.attach_retrieved("nobody", [DraftTree.from_lists([1], [-1])])
    assert engine.num_waiting == 1
    results = {r.request_id: Result()}
    while engine.has_work:
        for step in engine.step():
            results[step.request_id].add(step)
    assert results[r.request_id].visible == expected.visible


def test_a_place_is_free_again_after_cancelling_everyone() -> None:
    r, expected = case(2, 30)
    engine = engine_of(target(), max_batch_size=2)
    for name in "ab":
        engine.add(request(name, r.prompt_ids, **GREEDY))
    engine.step()
    engine.step()
    for name in "ab":
        engine.cancel(name)
    assert not engine.has_work
    assert engine.step() == []
    assert run(engine, [r])[r.request_id].visible == expected.visible


# ---- how outputs end


@pytest.mark.parametrize("adversary", [deepest, hidden_truth])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.fault(50)
def test_max_tokens_ends_an_accepted_run(max_tokens: int, adversary: Adversary) -> None:
    full, expected = case(2, 30)
    r = request("a", full.prompt_ids, max_tokens=max_tokens, ignore_eos=True)
    drafter = scripted(target(), {full.prompt_ids: expected.token_ids}, adversary)
    result = run(engine_of(target(), drafter), [r])["a"]
    assert result.token_ids == expected.token_ids[:max_tokens]
    assert result.finish_reason == "length"
    assert result.visible == engines.plain(target(), r).visible


@pytest.mark.parametrize("at", [0, 1, 6, 15, 16, 20])
@pytest.mark.fault(50)
def test_stop_token_ends_an_accepted_run(at: int) -> None:
    full, expected = case(2, 30)
    stop = expected.token_ids[at]
    first = expected.token_ids.index(stop)
    r = request("a", full.prompt_ids, stop_token_ids=(stop,), **GREEDY)
    drafter = scripted(target(), {full.prompt_ids: expected.token_ids}, deepest)
    result = run(engine_of(target(), drafter), [r])["a"]
    assert result.token_ids == expected.token_ids[: first + 1]
    assert result.finish_reason == "stop"
    assert result.visible == engines.plain(target(), r).visible


@pytest.mark.fault(50)
def test_eos_ends_an_accepted_run_unless_ignored() -> None:
    model = tiny_model("llama")
    with torch.no_grad():  # an output head that likes the end of text
        generator = torch.Generator().manual_seed(2)
        model.lm_head.weight[EOS] = torch.randn(64, generator=generator) * 0.8
    eos_target = wrap(model)
    ended = 0
    for seed in range(8):
        r = request("a", engines.random_prompt(seed, 12), max_tokens=NUM_TOKENS)
        endless = request("a", r.prompt_ids, **GREEDY)
        expected, future = engines.plain(eos_target, r), engines.plain(eos_target, endless)
        drafter = scripted(eos_target, {r.prompt_ids: future.token_ids}, deepest)
        result = run(engine_of(eos_target, drafter), [r])["a"]
        assert result.visible == expected.visible
        if EOS in future.token_ids:
            ended += future.token_ids.index(EOS) > 3
            assert result.token_ids == future.token_ids[: future.token_ids.index(EOS) + 1]
            assert result.finish_reason == "stop"
        assert run(engine_of(eos_target, drafter), [endless])["a"].visible == future.visible
    assert ended >= 2, "no output ended inside an accepted run"


@pytest.mark.parametrize("at", [0, 4, 11, 17])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.fault(50)
def test_stop_string_ends_an_accepted_run(at: int, length: int) -> None:
    full, expected = case(2, 30)
    printable = expected.text
    stop = printable[at : at + length]
    r = request("a", full.prompt_ids, stop=(stop,), **GREEDY)
    drafter = scripted(target(), {full.prompt_ids: expected.token_ids}, deepest)
    result = run(engine_of(target(), drafter), [r])["a"]
    assert result.finish_reason == "stop"
    assert result.text == printable[: printable.index(stop)]
    assert len(result.token_ids) < NUM_TOKENS
    assert result.token_ids == expected.token_ids[: len(result.token_ids)]
    assert result.visible == engines.plain(target(), r).visible


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        ((), 1, None),
        ((-1, 2), 1, None),
        ((VOCAB,), 1, None),
        (tuple([1] * 1000), 25, "context_length_exceeded"),
        (tuple([1] * 1025), 1, "context_length_exceeded"),
        ((1,), 10**18, "context_length_exceeded"),
    ],
)
def test_requests_that_can_never_be_served(
    prompt: tuple[int, ...], max_tokens: int, code: str | None
) -> None:
    engine = engine_of(target())
    with pytest.raises(RequestError) as refusal:
        engine.add(request("a", prompt, max_tokens=max_tokens))
    assert refusal.value.code == code
    assert refusal.value.param
    if code:
        assert "1024" in str(refusal.value)
        assert str(len(prompt) + max_tokens) in str(refusal.value)
    assert not engine.has_work


def test_the_last_position_of_the_context_can_be_used() -> None:
    prompt = engines.random_prompt(9, 1000)
    r = request("a", prompt, max_tokens=24, ignore_eos=True)
    expected = engines.plain(target(), r)
    assert len(expected.token_ids) == 24
    drafter = scripted(target(), {prompt: expected.token_ids}, deepest, random_trees)
    assert run(engine_of(target(), drafter), [r])["a"].visible == expected.visible


def test_an_id_in_use_is_refused() -> None:
    engine = engine_of(target())
    engine.add(request("a", (1, 2)))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", (3, 4)))


# ---- draft sources


class Recorder(Drafter):
    """The real drafter, remembering what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: list[tuple[str, list[int]]] = []

    def remember(self, namespace: str, prompt_ids: Any, output_ids: Any) -> None:
        self.remembered.append((namespace, list(output_ids)))
        super().remember(namespace, prompt_ids, output_ids)


@pytest.mark.parametrize("when", ["before admission", "after prefill", "in the middle"])
def test_retrieved_trees_may_come_at_any_time(when: str) -> None:
    r, expected = case(2, 30)
    tree = DraftTree.from_paths([expected.token_ids])
    engine = engine_of(target(), node_filter=keep_by_value)
    engine.add(r)
    result = Result()
    attached = when == "before admission"
    if attached:
        engine.attach_retrieved(r.request_id, [tree])
    while engine.has_work:
        for step in engine.step():
            result.add(step)
        if not attached and (when == "after prefill" or len(result.token_ids) > NUM_TOKENS // 2):
            engine.attach_retrieved(r.request_id, [tree])
            attached = True
    assert result.visible == expected.visible
    assert result.num_accepted > NUM_TOKENS // 4


def test_trees_for_a_request_that_does_not_speculate_are_ignored() -> None:
    r, expected = case(2, 30)
    engine = engine_of(target())
    engine.add(request("a", r.prompt_ids, speculative=False, **GREEDY))
    engine.attach_retrieved("a", [DraftTree.from_paths([expected.token_ids])])
    result = Result()
    while engine.has_work:
        for step in engine.step():
            result.add(step)
        engine.attach_retrieved("a", [DraftTree.from_paths([expected.token_ids])])
    assert result.visible == expected.visible
    assert result.num_accepted == 0
    assert result.stats is not None
    assert result.stats.num_draft_tokens == 0


def test_only_finished_greedy_answers_are_remembered() -> None:
    drafter = Recorder()
    engine = engine_of(target(), drafter, max_batch_size=4)
    greedy, expected = case(2, 30)
    seeded, _ = case(2, 30, greedy=False)
    engine.add(request("seeded", seeded.prompt_ids, **SEEDED))
    engine.add(request("cancelled", (1, 2, 3), **GREEDY))
    engine.add(greedy)
    while engine.has_work:
        engine.step()
        engine.cancel("cancelled")
    assert drafter.remembered == [("default", expected.token_ids)]


def test_an_answer_given_before_is_drafted() -> None:
    r, expected = case(2, 30)
    engine = engine_of(target(), node_filter=keep_by_value)
    first = run(engine, [r])[r.request_id]
    second = run(engine, [r])[r.request_id]
    assert first.visible == second.visible == expected.visible
    assert second.num_accepted > first.num_accepted
    other = GenerationRequest(
        request_id="b", prompt_ids=r.prompt_ids, params=r.params, namespace="other tenant"
    )
    stranger = run(engine, [other])["b"]
    assert stranger.visible == expected.visible
    assert stranger.num_accepted == first.num_accepted, "drafts from another tenant's answers"


def _raises(*_: Any) -> DraftTree:
    raise RuntimeError("broken draft source")


def _drops_parents(candidates: Sequence[Any], *_: Any) -> list[np.ndarray]:
    return [np.array([1], np.int32) for _ in candidates]


def _fails(*_: Any) -> list[np.ndarray]:
    raise RuntimeError("broken filter")


@pytest.mark.parametrize("broken", ["source", "filter", "failing filter"])
def test_broken_drafting_costs_only_speed(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    r, expected = case(2, 30)
    adversaries = (_raises, hidden_truth) if broken == "source" else (deepest,)
    drafter = scripted(target(), {r.prompt_ids: expected.token_ids}, *adversaries)
    filters = {"filter": _drops_parents, "failing filter": _fails}
    options = {"node_filter": filters[broken]} if broken in filters else {}
    engine = engine_of(target(), drafter, **options)
    with caplog.at_level(logging.CRITICAL):
        result = run(engine, [r])[r.request_id]
    assert result.visible == expected.visible
    assert engine.counters["draft_errors"] > 0


@pytest.mark.parametrize("bad_token", [-1, VOCAB, 2**31 - 1])
def test_drafts_that_name_no_token_cost_only_speed(bad_token: int) -> None:
    """A stored tree of another tokenizer, forced past every check."""
    r, expected = case(2, 30)
    tree = DraftTree.from_lists([bad_token, 1], [-1, 0])
    engine = engine_of(target(), scripted(target(), {}, engines.fixed(tree)), max_batch_size=2)
    mate, mate_expected = case(1, 5)
    results = run(engine, [r, mate])
    assert results[r.request_id].visible == expected.visible
    assert results[mate.request_id].visible == mate_expected.visible
    assert engine.counters["draft_errors"] > 0


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(DraftTree.from_lists([5] * 20, list(range(-1, 19))), id="too deep"),
        pytest.param(DraftTree.from_lists([5] * 90, [-1] * 90), id="too many nodes"),
        pytest.param(DraftTree.from_lists([5, 6], [1, -1]), id="child before parent"),
    ],
)
@pytest.mark.fault(8)
def test_malformed_trees_cost_only_speed(tree: DraftTree) -> None:
    """A draft source, or a filter, that ignores the limits it is given."""
    r, expected = case(2, 30)
    mate, mate_expected = case(1, 5)

    def everything(candidates: Sequence[Any], *_: Any) -> list[np.ndarray]:
        return [np.arange(len(candidate), dtype=np.int32) for candidate in candidates]

    drafter = scripted(target(), {}, lambda *_: tree)
    engine = engine_of(target(), drafter, max_batch_size=2, node_filter=everything)
    results = run(engine, [r, mate])
    assert results[r.request_id].visible == expected.visible
    assert results[mate.request_id].visible == mate_expected.visible
    assert engine.counters["draft_errors"] > 0


def test_running_requests_keep_their_thresholds() -> None:
    engine = engine_of(target(), max_batch_size=2)
    before = engine.thresholds
    engine.add(request("old", (1, 2, 3), max_tokens=8, ignore_eos=True))
    engine.step()
    other = type(before).from_json(before.to_json())
    engine.thresholds = type(before)(
        model_fingerprint=other.model_fingerprint,
        seen=other.seen,
        taken=other.taken,
        buckets=other.buckets,
        provenance={"made_by": "this test"},
    )
    assert engine.thresholds.version != before.version
    engine.add(request("new", (1, 2, 3), max_tokens=8, ignore_eos=True))
    versions = {}
    while engine.has_work:
        for step in engine.step():
            if step.stats is not None:
                versions[step.request_id] = step.stats.threshold_version
    assert versions == {"old": before.version, "new": engine.thresholds.version}


# ---- ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    """Every token has a twin with the same row of the output head."""
    model = tiny_model("llama")
    half = VOCAB // 2
    with torch.no_grad():
        model.lm_head.weight[half:] = model.lm_head.weight[:half]
    tied = wrap(model, dtype)
    tied.eos_token_ids = frozenset()
    r = request("a", engines.random_prompt(4, 25), max_tokens=NUM_TOKENS)
    expected = engines.plain(tied, r)
    assert max(expected.token_ids) < half
    twin = [token + half for token in expected.token_ids]

    def both(rng: Any, future: Sequence[int], vocab: int, nodes: int, depth: int) -> DraftTree:
        """The right tokens and, before each, its twin."""
        tokens, parents, last = [], [], -1
        for token in future[:depth]:
            tokens += [token + half, token]
            parents += [last, last]
            last = len(tokens) - 1
        return DraftTree.from_lists(tokens, parents)

    drafter = ScriptedDrafter([both], VOCAB, {r.prompt_ids: expected.token_ids})
    result = run(engine_of(tied, drafter), [r])["a"]
    assert result.visible == expected.visible
    assert result.num_accepted > NUM_TOKENS // 2
    drafter = ScriptedDrafter([deepest], VOCAB, {r.prompt_ids: twin})
    assert run(engine_of(tied, drafter), [r])["a"].num_accepted == 0


def test_trees_never_exceed_the_limit() -> None:
    """64 nodes on offer for each request, and `max_nodes` of all passed on to the filter."""
    limits = []

    def spy(candidates: Any, thresholds: Any, batch_size: int, max_nodes: int) -> Any:
        limits.extend((len(candidate), batch_size, max_nodes) for candidate in candidates)
        return keep_all(candidates, thresholds, batch_size, max_nodes)

    cases = [case(1, 5), case(2, 30)]
    futures = {r.prompt_ids: result.token_ids for r, result in cases}
    drafter = scripted(target(), futures, widest)
    run(engine_of(target(), drafter, node_filter=spy), [r for r, _ in cases])
    assert {most for _, _, most in limits} == {2 * MAX_TREE_NODES}
    assert {offered for offered, _, _ in limits} == {MAX_TREE_NODES}
    assert {batch_size for _, batch_size, _ in limits} == {2}


def test_envelope_runs_one_width_only() -> None:
    narrow = tiny_target("llama")
    narrow.exact_mode, narrow.min_width = "envelope", 72
    narrow.attention = TwoZoneAttention  # pads its products too
    cases = [case(seed, length) for seed, length in ((1, 5), (2, 30), (3, BLOCK - 12))]
    futures = {r.prompt_ids: result.token_ids for r, result in cases}
    drafter = scripted(narrow, futures, widest, deepest, hidden_truth)
    seen = []

    def spy(candidates: Any, thresholds: Any, batch_size: int, max_nodes: int) -> Any:
        seen.append(batch_size + max_nodes)
        return keep_all(candidates, thresholds, batch_size, max_nodes)

    widths = set()
    decoder = narrow.decoder

    class Spy:
        def forward(self, rows: Rows, attention: TwoZoneAttention) -> torch.Tensor:
            widths.update([len(rows.token_ids), len(rows.logit_rows)])
            widths.update(group.width for group in attention._groups)
            return decoder.forward(rows, attention)

    narrow.decoder = Spy()
    engine = engine_of(narrow, drafter, max_batch_size=3, node_filter=spy)
    results = run(engine, [r for r, _ in cases])
    assert max(seen) == 72
    assert widths == {72}
    for r, expected in cases:
        assert results[r.request_id].visible == expected.visible
