"""The filter for other people's trees."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import valuspec
from valuspec.cost import CostStaircase
from valuspec.errors import InvalidTreeError
from valuspec.evidence import CandidateTree, Evidence
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree
from valuspec.valuation import keep, values

EXAMPLE = Path(__file__).parents[2] / "examples" / "filter_foreign_trees.py"
THRESHOLDS = ThresholdSet.starting("somebody's model")


@st.composite
def trees(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size = draw(st.integers(0, 30))
    parents = np.array([draw(st.integers(-1, i - 1)) for i in range(size)], np.int64)
    probability = np.array([draw(st.floats(0, 1, width=32)) for _ in range(size)])
    return np.arange(size), parents, probability


@settings(deadline=None)
@given(trees(), st.integers(1, 16), st.integers(1, 20))
def test_it_is_the_engines_own_filter(tree, batch_size, max_nodes) -> None:
    tokens, parents, probability = tree
    kept, value = valuspec.filter_tree(
        tokens, parents, {"probability": probability}, THRESHOLDS,
        batch_size=batch_size, max_nodes=max_nodes,
    )  # fmt: skip
    draft = DraftTree.from_lists(tokens.tolist(), parents.tolist())
    candidate = CandidateTree(draft, Evidence.of_draft_model(draft, probability))
    assert value.tolist() == values(candidate, THRESHOLDS).tolist()
    assert kept.tolist() == keep(
        candidate, THRESHOLDS, batch_size=batch_size, max_nodes=max_nodes
    ).tolist()  # fmt: skip


def test_torch_in_torch_out() -> None:
    tokens, parents = torch.tensor([5, 6, 7]), torch.tensor([-1, 0, -1])
    probability = torch.tensor([0.9, 0.9, 0.001], dtype=torch.bfloat16)
    kept, value = valuspec.filter_tree(tokens, parents, {"probability": probability}, THRESHOLDS)
    assert isinstance(kept, torch.Tensor)
    assert isinstance(value, torch.Tensor)
    assert tokens[kept].tolist() == tokens[torch.as_tensor(kept)].tolist()
    assert value[0] >= value[1]


@pytest.mark.parametrize(
    ("parents", "evidence", "message"),
    [
        ([-1], {}, "2 tokens, but 1 parents"),
        ([-1, 1], {}, "does not precede"),
        ([-2, 0], {}, "below -1"),
        ([-1, 0], {"probability": [0.5]}, r"shape \(1,\); \(2,\) expected"),
        ([-1, 0], {"confidence": [0.5, 0.5]}, "confidence.* is not known; choose from"),
    ],
)
def test_what_is_no_tree_is_refused(parents, evidence, message) -> None:
    with pytest.raises(InvalidTreeError, match=message):
        valuspec.filter_tree([1, 2], parents, evidence, THRESHOLDS)


def test_drafting_time_lowers_the_speed_that_is_expected() -> None:
    """And with it the price of a node: a step that took long already may verify more."""
    cost = CostStaircase((1, 64), (0.02, 0.08))
    answer = list(range(40)) * 12

    def steps():
        for done in range(1, len(answer) - 2):
            yield answer[done : done + 3], [-1, 0, 1], {"probability": [0.9] * 3}, answer[done:]

    fast, slow = (
        valuspec.learn_thresholds([steps()], {1: cost}, draft_s=draft_s) for draft_s in (0.0, 0.02)
    )
    assert slow.buckets[0].stream_tok_s < 0.7 * fast.buckets[0].stream_tok_s


def test_the_example_runs_and_gains() -> None:
    speeds = runpy.run_path(str(EXAMPLE))["main"]()
    assert speeds["filtered"] > 1.1 * speeds["no drafts"]
    assert speeds["filtered"] > 1.1 * speeds["the whole tree"]
