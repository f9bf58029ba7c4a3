"""bench.peers: others' draft sources draft what their papers say, and never change an answer."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.peers.sources import token_recycling
from bench.peers.sources.rest import RestDrafter, chain, most_frequent, prefixes
from bench.peers.sources.session import everything, fitted
from bench.peers.sources.token_recycling import (
    CHILDREN,
    TEMPLATE,
    UNKNOWN,
    RecyclingDrafter,
    WatchedTarget,
    room_for_its_tree,
)
from tests.support.engines import engine_of, plain, random_prompt, request, run
from tests.support.tiny_models import tiny_target
from valuspec.drafting.drafter import MAX_DEPTH
from valuspec.engine import proposal
from valuspec.replay import Trajectory
from valuspec.tree import DraftTree


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[path].tolist()) for path in tree.leaf_paths()}


# -- Token Recycling


def test_its_tree_has_80_nodes_on_six_levels_wider_where_tokens_are_likelier() -> None:
    assert len(TEMPLATE) == sum(map(sum, CHILDREN)) == 80
    parents = [parent for parent, _ in TEMPLATE]
    depths = DraftTree.from_lists([0] * 80, parents).depths()
    assert [int((depths == d).sum()) for d in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    children = Counter(parents)
    ranks = {place: rank for place, (_, rank) in enumerate(TEMPLATE)}
    assert [children[node] for node in range(8)] == list(CHILDREN[1])
    assert [ranks[node] for node in range(8)] == list(range(8))
    for parent in set(parents):
        siblings = [rank for p, rank in TEMPLATE if p == parent]
        assert siblings == list(range(len(siblings))), "a rank is used only after those above it"


def test_the_matrix_fills_the_tree_from_the_pending_token_downwards(target) -> None:
    drafter = RecyclingDrafter(target)
    logits = torch.zeros(2, target.vocab_size)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])  # behind token 5
    logits[1, [4, 6]] = torch.tensor([2.0, 1.0])  # behind token 7
    drafter.refresh(np.array([5, 7]), logits)
    tree = drafter.draft(5, max_nodes=80, max_depth=6)
    firsts = tree.tokens[tree.parents < 0].tolist()
    assert firsts[:3] == [7, 8, 9]
    below = tree.tokens[tree.parents == 0].tolist()
    assert below[:2] == [4, 6]
    assert len(firsts) == len(below) == 8
    # Of the others nothing is known yet: the tree ends there.
    known = {5, 7}
    assert all(int(tree.tokens[parent]) in known for parent in tree.parents.tolist() if parent >= 0)
    assert not len(drafter.draft(3, 80, 6)), "nothing is known behind token 3"


def test_verified_rows_refresh_the_matrix_those_of_rejected_drafts_too(target) -> None:
    drafter = RecyclingDrafter(target)
    with room_for_its_tree():
        assert proposal.MAX_TREE_NODES == 80
        engine = engine_of(WatchedTarget(target, drafter), drafter, node_filter=everything)
        wanted = request("a", random_prompt(1, 20), max_tokens=40)
        found = run(engine, [wanted])["a"]
        again = run(engine, [request("b", random_prompt(1, 20), max_tokens=40)])["b"]
    assert proposal.MAX_TREE_NODES == 64
    assert found.token_ids == again.token_ids == plain(target, wanted).token_ids
    assert again.num_accepted >= found.num_accepted > 0
    learned = set(np.flatnonzero(drafter._matrix[:, 0] != UNKNOWN).tolist())
    assert set(found.token_ids[:-1]) <= learned
    assert learned - set(found.token_ids) - set(random_prompt(1, 20)), "tokens never accepted"


def test_earlier_answers_leave_the_matrix_as_decoding_them_would(target) -> None:
    prompt = random_prompt(2, 12)
    answer = plain(target, request("a", prompt, max_tokens=10)).token_ids
    trajectory = Trajectory(np.array(prompt, np.int32), np.array(answer, np.int32), 10)
    read, watched = RecyclingDrafter(target), RecyclingDrafter(target)
    read.learn([(trajectory, token_recycling.successors(target, trajectory))])
    engine = engine_of(WatchedTarget(target, watched), watched, node_filter=everything)
    run(engine, [request("a", prompt, max_tokens=10, speculative=False)])
    np.testing.assert_array_equal(read._matrix, watched._matrix)


# -- REST


def test_rest_counts_what_followed_the_longest_match(target) -> None:
    drafter = RestDrafter(tree=True)
    for output in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [9, 2, 3, 6]):
        drafter.remember("", [0, 0], output)
    lookup = drafter.look_up([7, 1, 2])
    lookup.extend([3])
    assert paths_of(lookup.draft(64, 15)) == {(4,), (5,)}, "9 2 3 is a shorter match"
    only_chain = RestDrafter(tree=False)
    for output in ([1, 2, 3, 4], [1, 2, 3, 5, 8], [1, 2, 3, 5, 8]):
        only_chain.remember("", [0, 0], output)
    assert paths_of(only_chain.look_up([1, 2, 3]).draft(64, 15)) == {(5, 8)}
    assert not len(only_chain.look_up([3, 7]).draft(64, 15)), "a miss drafts nothing"
    assert not len(RestDrafter(tree=True).look_up([1]).draft(64, 15))


def test_rest_keeps_the_most_frequent_prefixes_and_never_one_without_its_own() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (200, 10))
    rows[rng.random(200) < 0.3, 4:] = -1
    tokens, parents, counts = prefixes(rows)
    paths = DraftTree.from_paths([[t for t in row if t >= 0] for row in rows.tolist()])
    assert Counter(zip(counts, tokens, strict=True)) == Counter(
        zip(paths.counts.tolist(), paths.tokens.tolist(), strict=True)
    )
    tree = DraftTree.from_lists(tokens, parents, counts)
    kept = tree.select(most_frequent(counts, 64))  # raises if a parent is missing
    assert len(kept) == 64
    assert kept.counts.min() >= np.sort(tree.counts)[-64:].min()
    assert fitted(tree.select(chain(parents, counts)), 64, 5).depths().tolist() == [1, 2, 3, 4, 5]


# -- SuffixDecoding


class FakeCache:
    """Stands for the library's cache: remembers calls, drafts a fork of depth 3."""

    def __init__(self, max_tree_depth: int) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start_request(self, name: str, prompt: list[int]) -> None:
        self.calls.append(("start", name, len(prompt)))

    def add_active_response(self, name: str, tokens: list[int]) -> None:
        self.calls.append(("add", name, list(tokens)))

    def stop_request(self, name: str) -> None:
        self.calls.append(("stop", name))

    def speculate(self, name: str, context: list[int], **options: Any) -> SimpleNamespace:
        self.calls.append(("speculate", name, len(context), options))
        return SimpleNamespace(token_ids=[4, 5, 6, 7], parents=[-1, 0, 0, 2])


def test_the_suffix_cache_is_told_of_requests_as_vllm_tells_it(monkeypatch) -> None:
    library = SimpleNamespace(SuffixDecodingCache=FakeCache)
    monkeypatch.setitem(sys.modules, "arctic_inference", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", library)
    monkeypatch.delitem(sys.modules, "bench.peers.sources.suffix_decoding", raising=False)
    from bench.peers.sources.suffix_decoding import SuffixDrafter

    drafter = SuffixDrafter(tree=True)
    earlier = Trajectory(np.array([1, 2], np.int32), np.array([3], np.int32), 1)
    drafter.stock([earlier])
    session = drafter.start("", range(100))
    session.extend([8])
    candidate = session.propose(max_depth=2)
    drafter.remember("", range(100), [8, 9])
    calls = drafter.cache.calls
    assert calls[:3] == [("start", "request-1", 2), ("add", "request-1", [3]),
                         ("stop", "request-1")]  # fmt: skip
    options = {"max_spec_tokens": 16, "use_tree_spec": True}
    assert calls[3:] == [
        ("start", "request-2", 100), ("add", "request-2", [8]),
        ("speculate", "request-2", 64, options),
        ("stop", "request-2"),
    ], "the cache has the answer already: it is not added twice"  # fmt: skip
    assert candidate.tree.tokens.tolist() == [4, 5, 6], "cut at the depth allowed"
    assert candidate.evidence.depth.tolist() == [1, 2, 2]


# -- inside the engine


def test_a_peers_draft_is_as_deep_as_the_engine_allows_and_changes_no_answer(target) -> None:
    prompt = random_prompt(3, 30)
    wanted = request("a", prompt, max_tokens=40)
    answer = plain(target, wanted).token_ids
    drafter = RestDrafter(tree=True)
    drafter.remember("default", prompt, answer)
    session = drafter.start("default", prompt)
    candidate = session.propose()
    assert candidate.tree.tokens.tolist() == answer[:10]
    assert candidate.evidence.depth.tolist() == list(range(1, 11))
    assert int(session.propose(max_depth=3).evidence.depth.max()) == 3 < MAX_DEPTH
    found = run(engine_of(target, drafter, node_filter=everything), [wanted])["a"]
    assert found.token_ids == answer
    assert found.num_accepted > 20
