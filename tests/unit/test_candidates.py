"""The candidate tree against a trie of Python dictionaries, and draft sessions end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.drafting.candidates import (
    AGREEMENT_WEIGHT,
    DOUBT,
    MATCH_WEIGHT,
    CandidateBuilder,
    draft_reach,
)
from valuspec.drafting.drafter import MAX_DEPTH, Drafter
from valuspec.drafting.suffix import CONTEXT, MAX_MATCH, SEPARATOR, Continuations
from valuspec.evidence import CandidateTree, Source
from valuspec.tree import DraftTree

NAMESPACE = "tenant"


@dataclass
class Node:
    children: dict[int, Node] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    agreement: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def supports(self) -> list[float]:
        rows = zip(self.lengths, self.agreement, self.weights, strict=True)
        return [float(MATCH_WEIGHT[n] * AGREEMENT_WEIGHT[a] * weight) for n, a, weight in rows]

    @property
    def support(self) -> float:
        return sum(self.supports())

    @property
    def own_support(self) -> float:
        pairs = zip(self.supports(), self.sources, strict=True)
        return sum(support for support, source in pairs if source == Source.OWN)


Continuation = tuple[list[int], list[int], int, int, int]
"""Tokens, weights, match length, agreement, source."""


def naive_trie(rows: list[Continuation], max_depth: int) -> Node:
    root = Node()
    for tokens, weights, length, agreement, source in rows:
        node = root
        for token, weight in list(zip(tokens, weights, strict=True))[
            : min(max_depth, draft_reach(length))
        ]:
            node = node.children.setdefault(token, Node())
            node.lengths.append(length)
            node.agreement.append(agreement)
            node.weights.append(weight)
            node.sources.append(source)
    return root


def build(rows: list[Continuation], max_nodes: int, max_depth: int) -> CandidateTree:
    found = Continuations.allocate(64, MAX_DEPTH)
    for row, (tokens, weights, length, agreement, source) in enumerate(rows):
        found.tokens[row, : len(tokens)] = tokens
        found.tokens[row, len(tokens) :] = SEPARATOR
        found.weights[row, : len(tokens)] = weights
        found.lengths[row], found.sources[row] = length, source
        found.agreement[row] = agreement
    return CandidateBuilder().build(found, len(rows), max_nodes, max_depth)


@st.composite
def continuations(draw: st.DrawFn) -> list[Continuation]:
    rows = []
    for _ in range(draw(st.integers(0, 30))):
        tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_DEPTH))
        weights = [draw(st.integers(0, 3)) for _ in tokens]
        length, more = draw(st.integers(1, MAX_MATCH)), draw(st.integers(0, CONTEXT - MAX_MATCH))
        rows.append((tokens, weights, length, length + more, draw(st.sampled_from([1, 2, 4]))))
    return rows


@settings(max_examples=200, deadline=None)
@given(continuations(), st.integers(0, 64), st.integers(0, MAX_DEPTH))
def test_nodes_carry_the_evidence_of_a_naive_trie(
    rows: list[Continuation], max_nodes: int, max_depth: int
) -> None:
    candidate = build(rows, max_nodes, max_depth)
    tree, evidence = candidate.tree, candidate.evidence
    tree.validate(vocab_size=4, max_nodes=max_nodes, max_depth=max_depth)
    siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    root = naive_trie(rows, max_depth)
    nodes: list[Node] = []
    for i, (parent, token) in enumerate(siblings):
        above = root if parent < 0 else nodes[parent]
        node = above.children[token]
        nodes.append(node)
        others = above.children.values()
        assert evidence.sources[i] == np.bitwise_or.reduce(node.sources)
        assert evidence.match_length[i] == max(node.lengths)
        assert evidence.occurrences[i] == tree.counts[i] == sum(node.weights)
        assert evidence.parent_occurrences[i] == sum(sum(o.weights) for o in others)
        assert evidence.share[i] == pytest.approx(node.support / sum(o.support for o in others))
        if own := sum(o.own_support for o in others):
            assert evidence.own_share[i] == pytest.approx(node.own_support / own)
        else:
            assert np.isnan(evidence.own_share[i])
        assert evidence.depth[i] == (1 if parent < 0 else evidence.depth[parent] + 1)


def scores(root: Node) -> list[float]:
    """Path shares of all nodes of the trie that can be offered."""
    result, todo = [], [(root, 1.0)]
    while todo:
        node, score = todo.pop()
        total = sum(child.support for child in node.children.values()) + DOUBT
        for child in node.children.values():
            if sum(child.weights):
                result.append(score * child.support / total)
                todo.append((child, result[-1]))
    return result


@settings(max_examples=200, deadline=None)
@given(continuations(), st.integers(1, 12))
def test_the_nodes_of_highest_path_share_are_offered(
    rows: list[Continuation], max_nodes: int
) -> None:
    candidate = build(rows, max_nodes, MAX_DEPTH)
    root = naive_trie(rows, MAX_DEPTH)
    offered: list[tuple[Node, float]] = []
    for parent, token in zip(candidate.tree.parents, candidate.tree.tokens, strict=True):
        above, score = (root, 1.0) if parent < 0 else offered[parent]
        node = above.children[int(token)]
        total = sum(child.support for child in above.children.values()) + DOUBT
        offered.append((node, score * node.support / total))
    best = sorted(scores(root), reverse=True)[:max_nodes]
    assert [score for _, score in offered] == pytest.approx(best)


def test_a_pool_that_overflows_still_gives_a_valid_tree() -> None:
    rng = np.random.default_rng(0)
    found = Continuations.allocate(256, MAX_DEPTH)
    found.tokens[:] = rng.integers(0, 30_000, found.tokens.shape)
    found.weights[:] = 1
    found.lengths[:] = MAX_MATCH
    found.sources[:] = 1
    candidate = CandidateBuilder().build(found, 256, 64, MAX_DEPTH)
    candidate.tree.validate(vocab_size=30_000, max_nodes=64, max_depth=MAX_DEPTH)
    assert len(candidate) == 64


# -- sessions -------------------------------------------------------------------------------------


def paths(candidate: CandidateTree) -> list[list[int]]:
    tree = candidate.tree
    return [[int(tree.tokens[n]) for n in path] for path in tree.leaf_paths()]


def test_no_match_is_an_empty_tree() -> None:
    session = Drafter().start(NAMESPACE, [1, 2, 3])
    assert len(session.propose()) == 0
    assert len(Drafter().start(NAMESPACE, []).propose()) == 0


def test_own_text_is_found_across_prompt_and_output() -> None:
    session = Drafter().start(NAMESPACE, [1, 2, 3, 4])
    session.extend([9])
    session.extend([1, 2])
    candidate = session.propose()
    assert paths(candidate) == [[3, 4, 9, 1, 2]]
    assert set(candidate.evidence.sources.tolist()) == {Source.OWN}
    assert set(candidate.evidence.match_length.tolist()) == {2}


def test_remembered_answers_are_found_from_the_end_of_their_prompt_on() -> None:
    drafter = Drafter()
    drafter.remember(NAMESPACE, [50, 51, 52], [60, 61, 62])
    session = drafter.start(NAMESPACE, [70, 51, 52])
    candidate = session.propose()
    assert paths(candidate) == [[60, 61, 62]]
    assert set(candidate.evidence.sources.tolist()) == {Source.SHARED}


def test_a_stored_tree_is_remembered_like_the_answers_in_it() -> None:
    drafter = Drafter()
    drafter.remember_tree(NAMESPACE, DraftTree.from_paths([[60, 61, 62], [60, 61, 63]]))
    found = drafter.start(NAMESPACE, [70, 60, 61]).propose()
    assert sorted(paths(found)) == [[62], [63]]
    assert found.tree.counts.tolist() == [1, 1]
    assert set(found.evidence.sources.tolist()) == {Source.SHARED}
    assert len(drafter.start("another", [70, 60, 61]).propose()) == 0


def test_the_prompt_of_another_request_is_never_offered() -> None:
    drafter = Drafter()
    drafter.remember(NAMESPACE, [50, 51, 52, 53], [60])
    assert paths(drafter.start(NAMESPACE, [50, 51]).propose()) == []


def test_tenants_do_not_mix() -> None:
    drafter = Drafter()
    drafter.remember("one", [1, 2, 3], [4, 5, 6])
    assert len(drafter.start("two", [1, 2, 3]).propose()) == 0
    assert len(drafter.start("one", [1, 2, 3]).propose()) == 3


def test_one_token_budget_serves_all_tenants() -> None:
    drafter = Drafter(shared_tokens=64)
    drafter.remember("one", [1, 2, 3], [4, 5, 6])
    for start in range(100, 400, 30):
        drafter.remember("two", [7, 8, 9], list(range(start, start + 30)))
    assert len(drafter.start("one", [1, 2, 3]).propose()) == 0


def test_a_retrieved_tree_counts_every_node_once() -> None:
    trunk = list(range(20, 30))
    tree = DraftTree.from_paths([[*trunk, 1, 2], [*trunk, 1, 3], [*trunk, 4]])
    session = Drafter().start(NAMESPACE, [90, 91])
    session.add_retrieved([tree])
    session.extend(trunk[:6])
    found = session.propose()
    by_path = {tuple(p): n for p, n in zip(paths(found), range(9), strict=False)}
    assert set(by_path) == {(26, 27, 28, 29, 1, 2), (26, 27, 28, 29, 1, 3), (26, 27, 28, 29, 4)}
    counts = {int(t): int(c) for t, c in zip(found.tree.tokens, found.tree.counts, strict=True)}
    assert counts == {26: 3, 27: 3, 28: 3, 29: 3, 1: 2, 4: 1, 2: 1, 3: 1}
    assert set(found.evidence.sources.tolist()) == {Source.RETRIEVED}


def test_a_branch_is_found_by_the_tokens_before_its_branching_point() -> None:
    trunk = list(range(100, 140))
    tree = DraftTree.from_paths([[*trunk, 1, 2, 3], [*trunk, 4, 5, 6]])
    session = Drafter().start(NAMESPACE, [90, 91])
    session.add_retrieved([tree])
    session.extend(trunk)
    found = session.propose()
    assert sorted(paths(found)) == [[1, 2, 3], [4, 5, 6]]
    assert found.evidence.match_length.max() >= MAX_MATCH - 1
    session.extend([4, 5])
    assert paths(session.propose()) == [[6]]


def test_sources_combine() -> None:
    drafter = Drafter()
    drafter.remember(NAMESPACE, [0, 1], [2, 3])
    session = drafter.start(NAMESPACE, [1, 2, 3, 8, 1])
    session.add_retrieved([DraftTree.from_paths([[2, 4]])])
    evidence = session.propose().evidence
    assert evidence.sources[0] == Source.OWN | Source.RETRIEVED | Source.SHARED
    assert evidence.occurrences[0] == 3


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(0, 15), (3, 15), (64, 2), (64, 0)])
def test_limits_are_kept(max_nodes: int, max_depth: int) -> None:
    session = Drafter().start(NAMESPACE, list(range(30)) * 3)
    tree = session.propose(max_nodes, max_depth).tree
    tree.validate(vocab_size=30, max_nodes=max_nodes, max_depth=max_depth)
    assert len(tree) == min(max_nodes, max_depth)
