"""Values, the nodes kept, and the threshold sets that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec import evidence as ev
from valuspec.cost import CostStaircase
from valuspec.errors import ThresholdError
from valuspec.evidence import CandidateTree, Evidence, signatures
from valuspec.thresholds import SMOOTHING, BatchBucket, ThresholdSet
from valuspec.tree import DraftTree
from valuspec.valuation import keep, prune_retrieved, values

COST = CostStaircase((1, 8, 16, 64), (0.02, 0.024, 0.03, 0.08))


def threshold_set(
    *, tau: float = 0.0, tok_s: float = 50.0, cost: CostStaircase = COST, seed: int = 0
) -> ThresholdSet:
    """A set with random transfer counts, many signatures never seen."""
    rng = np.random.default_rng(seed)
    seen = rng.integers(0, 400, ev.NUM_CODES) * (rng.random(ev.NUM_CODES) < 0.5)
    taken = (seen * rng.random(ev.NUM_CODES)).astype(np.int64)
    bucket = BatchBucket(8, tau, tok_s, cost)
    return ThresholdSet(
        model_fingerprint="model", seen=seen.astype(np.int64), taken=taken, buckets=(bucket,)
    )


@st.composite
def candidates(draw: st.DrawFn, max_size: int = 64) -> CandidateTree:
    size = draw(st.integers(0, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(size)], np.int32)
    tree = DraftTree(np.arange(size, dtype=np.int32), parents, np.ones(size, np.int32))
    from_model = rng.random(size) < 0.3
    evidence = Evidence(
        sources=rng.integers(1, 8, size).astype(np.int32),
        match_length=rng.integers(1, 17, size).astype(np.int32),
        occurrences=rng.integers(1, 30, size).astype(np.int32),
        parent_occurrences=rng.integers(1, 40, size).astype(np.int32),
        depth=tree.depths(),
        share=rng.random(size).astype(np.float32),
        own_share=np.where(rng.random(size) < 0.5, rng.random(size), np.nan).astype(np.float32),
        probability=np.where(from_model, rng.random(size), np.nan).astype(np.float32),
        rank=rng.integers(0, 10, size).astype(np.int32),
    )
    return CandidateTree(tree, evidence)


# -- values and kept nodes ------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(candidates())
def test_values_are_products_of_rates_along_the_path(candidate: CandidateTree) -> None:
    thresholds = threshold_set()
    value = values(candidate, thresholds)
    rates = thresholds.rates[signatures(candidate.evidence)]
    for node, parent in enumerate(candidate.tree.parents):
        above = value[parent] if parent >= 0 else np.float32(1.0)
        assert value[node] == above * rates[node]
        assert 0.0 < value[node] <= above


def is_ancestor_closed(tree: DraftTree, kept: list[int]) -> bool:
    return all(tree.parents[n] < 0 or int(tree.parents[n]) in kept for n in kept)


@settings(max_examples=100, deadline=None)
@given(candidates(), st.floats(0, 1), st.floats(0, 1), st.integers(0, 70))
def test_kept_nodes_are_ancestor_closed_and_fewer_for_a_higher_tau(
    candidate: CandidateTree, low: float, high: float, max_nodes: int
) -> None:
    low, high = sorted((low, high))
    by_tau = []
    for tau in (low, high):
        thresholds = threshold_set(tau=tau)
        kept = keep(candidate, thresholds, batch_size=1, max_nodes=max_nodes)
        assert kept.dtype == np.int32
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert len(kept) <= max_nodes
        assert is_ancestor_closed(candidate.tree, kept.tolist())
        assert np.all(values(candidate, thresholds)[kept] >= tau)
        by_tau.append(set(kept.tolist()))
    assert by_tau[1] <= by_tau[0]


@settings(max_examples=60, deadline=None)
@given(candidates(max_size=8), st.floats(1, 500), st.integers(0, 5))
def test_no_ancestor_closed_choice_pays_better(
    candidate: CandidateTree, tok_s: float, seed: int
) -> None:
    """Against all subsets, with a cost that is flat, then steep, then flat again."""
    stairs = CostStaircase((1, 2, 3, 5, 6, 9), (0.02, 0.02, 0.025, 0.025, 0.03, 0.031))
    thresholds = threshold_set(tok_s=tok_s, cost=stairs, seed=seed)
    value = values(candidate, thresholds).astype(float)
    seconds = stairs.table(9)

    def gain(kept: tuple[int, ...]) -> float:
        return float(value[list(kept)].sum()) - tok_s * (seconds[len(kept)] - seconds[0])

    everything = range(len(candidate))
    best = max(
        gain(kept)
        for size in range(len(candidate) + 1)
        for kept in combinations(everything, size)
        if is_ancestor_closed(candidate.tree, list(kept))
    )
    kept = keep(candidate, thresholds, batch_size=1, max_nodes=64)
    assert gain(tuple(kept.tolist())) == pytest.approx(best, abs=1e-5)


def test_no_tree_is_kept_when_every_row_costs_more_than_it_brings() -> None:
    tree = DraftTree.from_paths([[1, 2, 3]])
    candidate = CandidateTree(tree, Evidence.of_tree(tree))
    steep = CostStaircase((1, 2), (0.02, 0.08))
    assert len(keep(candidate, threshold_set(cost=steep), batch_size=1, max_nodes=64)) == 0
    flat = CostStaircase((1, 2), (0.02, 0.02))
    assert len(keep(candidate, threshold_set(cost=flat), batch_size=1, max_nodes=64)) == 3


def test_the_bucket_of_the_batch_decides() -> None:
    tree = DraftTree.from_paths([[1, 2, 3]])
    candidate = CandidateTree(tree, Evidence.of_tree(tree))
    flat = CostStaircase((1, 2), (0.02, 0.02))
    thresholds = replace(
        threshold_set(),
        buckets=(BatchBucket(1, 0.0, 50.0, flat), BatchBucket(8, 1.0, 50.0, flat)),
    )
    kept = [len(keep(candidate, thresholds, batch_size=b, max_nodes=64)) for b in (1, 2, 8, 99)]
    assert kept == [3, 0, 0, 0]


def test_a_tree_larger_than_the_cost_table_is_kept_in_part() -> None:
    tree = DraftTree.from_paths([[token] for token in range(3000)])
    candidate = CandidateTree(tree, Evidence.of_tree(tree))
    flat = CostStaircase((1, 2), (0.02, 0.02))
    kept = keep(candidate, threshold_set(cost=flat), batch_size=1, max_nodes=5000)
    assert 1000 < len(kept) < 3000


# -- stored trees ---------------------------------------------------------------------------------


def test_pruning_a_stored_tree_drops_rare_branches_and_their_children() -> None:
    tree = DraftTree.from_paths([[1, 2]] * 99 + [[7, 8]])
    seen, taken = np.zeros((2, ev.NUM_CODES), np.int64)
    rare, common = (int(np.searchsorted(ev.SHARE_EDGES, s, side="right")) for s in (0.01, 0.99))
    block = ev.NUM_OCCURRENCE_CODES // ev.SHAPE[0]
    seen[: ev.NUM_OCCURRENCE_CODES] = 10_000
    taken[rare * block : (rare + 1) * block] = 10
    taken[common * block : ev.NUM_OCCURRENCE_CODES] = 9_000
    bucket = BatchBucket(1, 0.05, 50.0, COST)
    thresholds = ThresholdSet(model_fingerprint="m", seen=seen, taken=taken, buckets=(bucket,))
    kept = prune_retrieved(tree, thresholds, 0.5)
    assert tree.tokens[kept].tolist() == [1, 2]
    tree.select(kept)  # raises unless ancestor-closed


def test_trees_of_dissimilar_requests_are_dropped() -> None:
    tree = DraftTree.from_paths([[1, 2]])
    thresholds = replace(threshold_set(), min_similarity=0.5)
    assert len(prune_retrieved(tree, thresholds, 0.49)) == 0
    assert len(prune_retrieved(tree, thresholds, 0.5)) == 2
    assert len(prune_retrieved(DraftTree.empty(), thresholds, 0.5)) == 0


# -- rates ----------------------------------------------------------------------------------------


def test_rates_back_off_from_full_to_coarser_signatures() -> None:
    """Recomputed for one code by the definition, coarsest signature first."""
    thresholds = threshold_set(seed=3)
    code = int(np.flatnonzero(thresholds.seen[: ev.NUM_OCCURRENCE_CODES])[7])
    place = np.unravel_index(code, ev.SHAPE)
    seen = thresholds.seen[: ev.NUM_OCCURRENCE_CODES].reshape(ev.SHAPE)
    taken = thresholds.taken[: ev.NUM_OCCURRENCE_CODES].reshape(ev.SHAPE)
    rate = 0.1
    for known in range(len(ev.SHAPE) + 1):
        where = place[:known]
        rate = (taken[where].sum() + SMOOTHING * rate) / (seen[where].sum() + SMOOTHING)
    assert thresholds.rates[code] == pytest.approx(rate)


def test_rates_of_draft_model_edges_are_their_own() -> None:
    tree = DraftTree.from_paths([[1]])
    candidate = CandidateTree(tree, Evidence.of_draft_model(tree, np.array([0.97], np.float32)))
    code = int(signatures(candidate.evidence)[0])
    assert ev.NUM_OCCURRENCE_CODES <= code < ev.NUM_CODES


def test_what_occurred_speaks_for_a_draft_models_edge_too() -> None:
    tree = DraftTree.from_paths([[1]])
    alone = Evidence.of_draft_model(tree, np.array([0.6], np.float32))
    once = np.ones(1, np.int32)
    settings = [
        alone,
        alone._replace(parent_occurrences=once),  # the target went on, but never to this token
        alone._replace(parent_occurrences=once, share=np.array([0.9], np.float32)),
        alone._replace(rank=np.array([3], np.int32)),
    ]
    codes = {int(signatures(evidence)[0]) for evidence in settings}
    assert len(codes) == len(settings)


def test_a_draft_model_nobody_has_counted_is_believed() -> None:
    tree = DraftTree.from_paths([[1], [2], [3]])
    probability = np.array([0.02, 0.6, 0.97], np.float32)
    evidence = Evidence.of_draft_model(tree, probability)
    uncounted = replace(ThresholdSet.starting("m"), seen=np.zeros(ev.NUM_CODES, np.int64),
                        taken=np.zeros(ev.NUM_CODES, np.int64))  # fmt: skip
    assert uncounted.rates[signatures(evidence)] == pytest.approx([0.02, 0.6, 0.97], abs=0.01)


def test_recalibration_from_text_alone_keeps_what_is_known_of_a_draft_model() -> None:
    one, other = ThresholdSet.starting("model"), ThresholdSet.starting("model")
    cut = ev.NUM_OCCURRENCE_CODES
    seen, taken = other.seen.copy(), other.taken.copy()
    seen[:cut], taken[:cut] = 0, 0
    seen[cut:], taken[cut:] = 50, 40
    mixed = one.with_draft_model_of(replace(other, seen=seen, taken=taken))
    assert np.array_equal(mixed.rates[:cut], one.rates[:cut])
    assert mixed.rates[cut:] == pytest.approx(0.8, abs=0.01)


@settings(max_examples=200, deadline=None)
@given(candidates())
def test_signatures_are_in_range(candidate: CandidateTree) -> None:
    codes = signatures(candidate.evidence)
    assert np.all((codes >= 0) & (codes < ev.NUM_CODES))
    from_model = ~np.isnan(candidate.evidence.probability)
    assert np.array_equal(codes >= ev.NUM_OCCURRENCE_CODES, from_model)


# -- threshold sets as values ---------------------------------------------------------------------


def test_json_round_trip_keeps_content_and_version(tmp_path: Path) -> None:
    original = replace(threshold_set(tau=0.03), provenance={"made": "here"})
    path = tmp_path / "set.json"
    path.write_text(original.to_json())
    loaded = ThresholdSet.load(path)
    assert loaded.version == original.version
    assert np.array_equal(loaded.rates, original.rates)
    assert loaded.buckets == original.buckets
    assert loaded.provenance == {"made": "here"}


def test_the_version_follows_the_content() -> None:
    base = threshold_set()
    taken = base.taken.copy()
    taken[np.argmax(base.seen - base.taken)] += 1
    others = [
        replace(base, taken=taken),
        replace(base, model_fingerprint="other"),
        replace(base, buckets=(replace(base.buckets[0], tau=0.5),)),
        replace(base, min_similarity=0.1),
        replace(base, provenance={"a": 1}),
    ]
    assert len({s.version for s in [base, *others]}) == 6
    assert threshold_set().version == base.version


def test_a_set_cannot_be_changed() -> None:
    thresholds = threshold_set()
    with pytest.raises(ValueError, match="read-only"):
        thresholds.seen[0] = 1
    with pytest.raises(AttributeError):
        thresholds.min_similarity = 0.5  # type: ignore[misc]


def test_the_shipped_set_loads_and_is_lent_to_other_models() -> None:
    lent = ThresholdSet.starting("another model")
    assert lent.validate(model_fingerprint="another model") is lent
    assert "borrowed_from" in lent.provenance


Edit = Callable[[dict[str, Any]], object]

REFUSALS: dict[str, tuple[Edit, str]] = {
    "older schema": (lambda d: d.update(schema=0), "schema version 0"),
    "no schema": (lambda d: d.pop("schema"), "schema version None"),
    "other buckets": (lambda d: d.update(signatures="0"), "signature buckets"),
    "tau nan": (lambda d: d["buckets"][0].update(tau=float("nan")), "NaN"),
    "tau infinite": (lambda d: d["buckets"][0].update(tau=float("inf")), "Infinity"),
    "tau above one": (lambda d: d["buckets"][0].update(tau=1.5), "tau is 1.5"),
    "tau negative": (lambda d: d["buckets"][0].update(tau=-0.1), "tau is -0.1"),
    "tau a word": (lambda d: d["buckets"][0].update(tau="low"), "not a threshold set"),
    "rate zero": (lambda d: d["buckets"][0].update(stream_tok_s=0), "stream_tok_s"),
    "batch zero": (lambda d: d["buckets"][0].update(max_batch_size=0), "max_batch_size"),
    "no buckets": (lambda d: d.update(buckets=[]), "batch buckets"),
    "buckets twice": (lambda d: d["buckets"].append(d["buckets"][0]), "batch buckets"),
    "cost falls": (lambda d: d["buckets"][0]["cost"].update(rows=[1, 2], seconds=[2, 1]), "fall"),
    "cost of zero": (
        lambda d: d["buckets"][0]["cost"].update(rows=[1, 2], seconds=[0, 1]),
        "positive",
    ),
    "cost rows unordered": (
        lambda d: d["buckets"][0]["cost"].update(rows=[2, 1], seconds=[1, 2]),
        "ascend",
    ),
    "taken above seen": (
        lambda d: d["transfers"].update(codes=[1], seen=[1], taken=[2]),
        "taken <= seen",
    ),
    "negative counts": (
        lambda d: d["transfers"].update(codes=[1], seen=[1], taken=[-1]),
        "taken <= seen",
    ),
    "code out of range": (
        lambda d: d["transfers"].update(codes=[ev.NUM_CODES], seen=[1], taken=[1]),
        "codes span",
    ),
    "code twice": (
        lambda d: d["transfers"].update(codes=[1, 1], seen=[1, 1], taken=[1, 1]),
        "distinct",
    ),
    "counts beyond 64 bits": (
        lambda d: d["transfers"].update(codes=[1], seen=[2**70], taken=[1]),
        "not a threshold set",
    ),
    "part missing": (lambda d: d.pop("transfers"), "transfers"),
    "similarity nan": (lambda d: d.update(min_similarity=None), "not a threshold set"),
    "edited by hand": (lambda d: d["buckets"][0].update(tau=0.25), "content hashes to"),
    "no version": (lambda d: d.pop("version"), "the set says None"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_damaged_set_is_refused_with_the_reason(case: str) -> None:
    edit, reason = REFUSALS[case]
    data = json.loads(threshold_set().to_json())
    edit(data)
    with pytest.raises(ThresholdError, match=reason):
        ThresholdSet.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", b"\xff\xfe"])
def test_what_is_no_set_at_all_is_refused(text: str | bytes) -> None:
    with pytest.raises(ThresholdError):
        ThresholdSet.from_json(text)


def test_a_set_of_another_model_is_refused() -> None:
    with pytest.raises(ThresholdError, match="recalibrate"):
        threshold_set().validate(model_fingerprint="another")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ThresholdError, match="cannot read"):
        ThresholdSet.load(tmp_path / "none.json")


# -- cost -----------------------------------------------------------------------------------------


def test_cost_is_interpolated_and_goes_on_at_the_last_slope() -> None:
    table = CostStaircase((1, 3, 5), (1.0, 3.0, 4.0)).table(7)
    assert table.tolist() == pytest.approx([1.0, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0])


def test_measured_noise_never_makes_fewer_rows_dearer() -> None:
    cost = CostStaircase.from_points((1, 2, 4, 8), (30.0, 24.0, 22.0, 25.0))
    assert cost.seconds == (22.0, 22.0, 22.0, 25.0)


def test_measuring_takes_medians_of_turns() -> None:
    behind = 50.0  # a small forward behind the largest does not count
    outlier = iter([9.0, behind, 1.0, 2.0, behind, 90.0, 2.0, behind, 1.0, 2.5])
    cost = CostStaircase.measure(lambda n: next(outlier), rows=(1, 2), repeats=3)
    assert cost.seconds == (1.0, 2.0)
