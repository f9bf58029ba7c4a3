"""The shared budget against every choice there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.budget import share_budget
from valuspec.cost import CostStaircase
from valuspec.evidence import CandidateTree, Evidence, signatures
from valuspec.thresholds import BatchBucket, ThresholdSet
from valuspec.tree import DraftTree
from valuspec.valuation import keep, values

SHIPPED = ThresholdSet.starting("model")
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.2, 1.9), (1.0, 3.0, 9.0)]


def thresholds(cost: tuple[float, ...], tau: float = 0.0, tok_s: float = 1.5) -> ThresholdSet:
    staircase = CostStaircase((1, 3, 8), cost, per_token=1e-5, per_key=4e-6)
    return replace(SHIPPED, buckets=(BatchBucket(16, tau, tok_s, staircase),))


@st.composite
def candidates(draw: st.DrawFn, most: int = 5) -> CandidateTree:
    size = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    probability = [draw(st.sampled_from([0.02, 0.2, 0.5, 0.8, 0.95])) for _ in range(size)]
    tree = DraftTree.from_lists(list(range(size)), parents)
    evidence = Evidence.of_draft_model(tree, np.array(probability, np.float32))
    return CandidateTree(tree, evidence, context=draw(st.sampled_from([10, 400, 3000])))


def closed_subsets(parents: list[int]) -> list[tuple[int, ...]]:
    """Every set of nodes that holds the parents of its nodes."""
    nodes = range(len(parents))
    every = itertools.chain.from_iterable(
        itertools.combinations(nodes, size) for size in range(len(parents) + 1)
    )
    return [s for s in every if all(parents[n] in (-1, *s) for n in s)]


def gain(
    chosen: list[tuple[int, ...]],
    offers: list[CandidateTree],
    used: ThresholdSet,
    batch_size: int,
) -> float:
    """Expected tokens of the batch, less what their verification costs."""
    expected = sum(
        float(values(offer, used)[list(nodes)].sum())
        for offer, nodes in zip(offers, chosen, strict=True)
    )
    bucket = used.buckets[0]
    rows = 1 + sum(map(len, chosen)) / batch_size
    context = np.mean([offer.context for offer in offers])
    plain = bucket.cost.seconds[0] + bucket.cost.extra(1, context)
    wide = np.interp(rows, bucket.cost.rows, bucket.cost.seconds) + bucket.cost.extra(rows, context)
    stream_tok_s = bucket.stream_tok_s * bucket.cost.seconds[0] / plain
    return float(expected - batch_size * stream_tok_s * (wide - plain))


@settings(max_examples=120, deadline=None)
@given(
    offers=st.lists(candidates(), min_size=1, max_size=3),
    idle=st.integers(0, 2),
    cost=st.sampled_from(COSTS),
    max_nodes=st.integers(0, 12),
)
def test_no_other_choice_gains_more(
    offers: list[CandidateTree], idle: int, cost: tuple[float, ...], max_nodes: int
) -> None:
    used, batch_size = thresholds(cost), len(offers) + idle
    if batch_size == 1:
        return  # `keep` decides, which has tests of its own
    found = share_budget(offers, [used] * len(offers), batch_size=batch_size, max_nodes=max_nodes)
    chosen = [tuple(part.tolist()) for part in found]
    choices = itertools.product(*(closed_subsets(o.tree.parents.tolist()) for o in offers))
    best = max(
        gain(list(choice), offers, used, batch_size)
        for choice in choices
        if sum(map(len, choice)) <= max_nodes
    )
    assert sum(map(len, chosen)) <= max_nodes
    for nodes, offer in zip(chosen, offers, strict=True):
        assert nodes in closed_subsets(offer.tree.parents.tolist())
    assert gain(chosen, offers, used, batch_size) == pytest.approx(best, abs=1e-5)


@given(offer=candidates(12), cost=st.sampled_from(COSTS), max_nodes=st.integers(1, 12))
def test_one_request_alone_gets_what_keep_gives(
    offer: CandidateTree, cost: tuple[float, ...], max_nodes: int
) -> None:
    used = thresholds(cost)
    (shared,) = share_budget([offer], [used], batch_size=1, max_nodes=max_nodes)
    assert shared.tolist() == keep(offer, used, batch_size=1, max_nodes=max_nodes).tolist()


def chain(probability: float, size: int = 6) -> CandidateTree:
    tree = DraftTree.from_lists(list(range(size)), list(range(-1, size - 1)))
    evidence = Evidence.of_draft_model(tree, np.full(size, probability, np.float32))
    return CandidateTree(tree, evidence)


def transfers(used: ThresholdSet, rate_of_sure: float, rate_of_unsure: float) -> ThresholdSet:
    """A set that has seen edges of two draft probabilities, and how often they came true."""
    seen, taken = np.zeros_like(used.seen), np.zeros_like(used.taken)
    for offer, rate in ((chain(0.999), rate_of_sure), (chain(0.02), rate_of_unsure)):
        codes = signatures(offer.evidence)
        seen[codes], taken[codes] = 100_000, int(100_000 * rate)
    return replace(used, seen=seen, taken=taken)


def test_sure_requests_take_the_rows_of_unsure_ones() -> None:
    used = transfers(thresholds((1.0, 1.6, 3.1)), 0.95, 0.1)
    sure, unsure = share_budget(
        [chain(0.999), chain(0.02)], [used] * 2, batch_size=2, max_nodes=128
    )
    assert len(sure) == 6
    assert len(unsure) == 0


def test_nothing_is_kept_where_nothing_pays() -> None:
    used = transfers(thresholds((1.0, 3.0, 9.0)), 0.3, 0.1)
    parts = share_budget([chain(0.999)] * 3, [used] * 3, batch_size=3, max_nodes=128)
    assert [len(part) for part in parts] == [0, 0, 0]


def test_each_request_keeps_its_own_threshold() -> None:
    free = transfers(thresholds((1.0, 1.0, 1.0)), 0.9, 0.9)
    strict = replace(free, buckets=(replace(free.buckets[0], tau=0.75),))
    parts = share_budget([chain(0.999)] * 2, [strict, free], batch_size=2, max_nodes=128)
    assert [len(part) for part in parts] == [2, 6]
