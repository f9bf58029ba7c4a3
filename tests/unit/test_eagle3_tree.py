"""The batched dynamic tree against a slow one that keeps nothing between nodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.eagle_heads import random_head, slow_log_p
from valuspec.drafting.eagle3 import HeadDraft
from valuspec.eagle3.drafter import HeadDrafter
from valuspec.eagle3.tree import TreeShape
from valuspec.engine.kv_cache import own_blocks

Path = tuple[int, ...]


def slow_tree(head, features, tokens, shape: TreeShape, max_depth: int) -> dict[Path, tuple]:
    """(probability given the parent, rank) by path of token ids."""
    known = head.token_ids(torch.arange(head.config.draft_vocab_size)).tolist()
    frontier: list[Path] = [()]
    found: dict[Path, tuple[float, int]] = {}
    score: dict[Path, float] = {(): 0.0}
    for _ in range(min(shape.depth + 1, max_depth)):
        children: list[Path] = []
        for path in frontier:
            log_p = slow_log_p(head, features, tokens, path)
            for rank, draft_id in enumerate(log_p.topk(shape.top_k).indices.tolist()):
                child = (*path, known[draft_id])
                found[child] = (float(log_p[draft_id].exp()), rank)
                score[child] = score[path] + float(log_p[draft_id])
                children.append(child)
        frontier = sorted(children, key=lambda c: -score[c])[: shape.top_k]
    best = sorted(found, key=lambda c: -score[c])[: shape.total_tokens - 1]
    return {path: found[path] for path in best}


def by_path(draft: HeadDraft) -> dict[Path, tuple]:
    paths: list[Path] = []
    edges = zip(draft.tree.tokens.tolist(), draft.tree.parents.tolist(), strict=True)
    for token, parent in edges:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {
        p: (float(prob), int(rank))
        for p, prob, rank in zip(paths, draft.probability, draft.rank, strict=True)
    }


def assert_equal(draft: HeadDraft, expected: dict[Path, tuple]) -> None:
    found = by_path(draft)
    assert len(found) == len(draft.tree)
    assert found.keys() == expected.keys()
    for path, (probability, rank) in expected.items():
        assert found[path] == (pytest.approx(probability, rel=1e-3, abs=1e-6), rank)


def observed(drafter: HeadDrafter, place: int, features, tokens, cuts) -> None:
    """The pairs of a sequence, handed over in pieces."""
    bounds = [0, *sorted({c for c in cuts if c < len(tokens)}), len(tokens)]
    for first, end in itertools.pairwise(bounds):
        drafter.observe(place, first, features[first:end], np.array(tokens[first:end]))


OPTIONS = st.fixed_dictionaries(
    {name: st.booleans() for name in
     ("norm_before_residual", "norm_before_fc", "norm_output", "qk_norm")}
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    shape=st.builds(TreeShape, st.integers(1, 4), st.integers(0, 3), st.integers(2, 30)),
    max_depth=st.integers(1, 5),
    options=OPTIONS,
)
def test_trees_of_a_batch_are_those_of_the_slow_reference(
    seed, lengths, shape, max_depth, options
) -> None:
    head = random_head(seed, **options)
    torch.manual_seed(seed)
    contexts = [(torch.randn(n, 96), torch.randint(0, 60, (n,)).tolist()) for n in lengths]
    expected = [slow_tree(head, *context, shape, max_depth) for context in contexts]
    drafter = HeadDrafter(head, own_blocks(4, 128), 4, shape)
    places = np.random.default_rng(seed).permutation(4)[: len(contexts)].tolist()
    for place, context in zip(places, contexts, strict=True):
        observed(drafter, place, *context, cuts=(1, 3))
    drafts = drafter.draft(places, [max_depth] * len(places))
    for draft, tree in zip(drafts, expected, strict=True):
        assert_equal(draft, tree)


def test_a_long_context_is_kept_over_drafts_and_blocks() -> None:
    head, shape = random_head(3), TreeShape(2, 1, 5)
    features, tokens = torch.randn(140, 96), torch.randint(0, 60, (140,)).tolist()
    expected = slow_tree(head, features, tokens, shape, 9)
    drafter = HeadDrafter(head, own_blocks(1, 256), 2, shape)
    for first in range(0, 140, 35):
        end = first + 35
        drafter.observe(0, first, features[first:end], np.array(tokens[first:end]))
        drafted = drafter.draft([0], [9])
    assert_equal(drafted[0], expected)


def test_a_place_that_is_taken_over_starts_afresh() -> None:
    head, shape = random_head(4), TreeShape(2, 1, 6)
    features, tokens = torch.randn(4, 96), [5, 6, 7, 8]
    expected = slow_tree(head, features, tokens, shape, 9)
    drafter = HeadDrafter(head, own_blocks(1, 128), 1, shape)
    drafter.observe(0, 0, torch.randn(9, 96), np.arange(9))
    drafter.forget(0)
    drafter.observe(0, 0, features, np.array(tokens))
    assert_equal(drafter.draft([0], [9])[0], expected)


def test_equal_scores_never_part_a_child_from_its_parent() -> None:
    """A head that is certain gives whole paths the same score."""
    head = random_head(5)
    with torch.no_grad():
        head.lm_head.weight.zero_()
    drafter = HeadDrafter(head, own_blocks(1, 128), 1, TreeShape(3, 3, 20))
    drafter.observe(0, 0, torch.randn(2, 96), np.array([1, 2]))
    tree = drafter.draft([0], [9])[0].tree
    tree.validate(vocab_size=60, max_nodes=19, max_depth=4)
