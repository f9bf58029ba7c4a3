"""Merging a head's tree with what occurred."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.drafting.eagle3 import UNLISTED, HeadDraft, merge
from valuspec.evidence import CandidateTree, Evidence
from valuspec.tree import DraftTree

Path = tuple[int, ...]
paths_of = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


def by_path(tree: DraftTree) -> dict[Path, int]:
    found: dict[Path, int] = {}
    known: list[Path] = []
    for node, (token, parent) in enumerate(
        zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
    ):
        known.append((*(known[parent] if parent >= 0 else ()), token))
        found[known[-1]] = node
    assert len(found) == len(tree)
    return found


def occurred(paths: list[list[int]]) -> CandidateTree:
    tree = DraftTree.from_paths(paths)
    return CandidateTree(tree, Evidence.of_tree(tree))


def drafted(paths: list[list[int]], seed: int = 0) -> HeadDraft:
    tree = DraftTree.from_paths(paths)
    rng = np.random.default_rng(seed)
    return HeadDraft(
        tree, rng.random(len(tree)).astype(np.float32), rng.integers(0, 4, len(tree), np.int32)
    )


@settings(deadline=None)  # the first call compiles
@given(paths_of, paths_of, st.integers(0, 99))
def test_the_merged_tree_has_the_nodes_and_the_evidence_of_both(one, other, seed) -> None:
    candidate, draft = replace(occurred(one), context=seed), drafted(other, seed)
    merged = merge(candidate, draft)
    assert merged.context == seed
    nodes, old, new = by_path(merged.tree), by_path(candidate.tree), by_path(draft.tree)
    assert nodes.keys() == old.keys() | new.keys()
    merged.tree.validate(vocab_size=4, max_nodes=64, max_depth=4)
    asked = {path[:-1] for path in new}
    went_on = {path[:-1] for path in old}
    for path, node in nodes.items():
        evidence = {name: field[node] for name, field in merged.evidence._asdict().items()}
        assert evidence["depth"] == len(path)
        if path in new:
            assert evidence["probability"] == draft.probability[new[path]]
            assert evidence["rank"] == draft.rank[new[path]]
        elif path[:-1] in asked:
            assert (evidence["probability"], evidence["rank"]) == (0.0, UNLISTED)
        else:
            assert np.isnan(evidence["probability"])
        if path in old:
            assert evidence["share"] == candidate.evidence.share[old[path]]
            assert evidence["sources"] == candidate.evidence.sources[old[path]]
            assert merged.tree.counts[node] == candidate.tree.counts[old[path]]
        else:
            assert evidence["share"] == evidence["sources"] == evidence["occurrences"] == 0
        assert (evidence["parent_occurrences"] > 0) == (path[:-1] in went_on)


def test_nothing_occurred() -> None:
    draft = drafted([[1, 2], [3]])
    merged = merge(occurred([]), draft)
    assert merged.tree.tokens.tolist() == draft.tree.tokens.tolist()
    assert merged.evidence.probability.tolist() == draft.probability.tolist()


def test_the_head_proposes_nothing() -> None:
    candidate = occurred([[1, 2]])
    merged = merge(candidate, drafted([]))
    assert merged.tree.tokens.tolist() == [1, 2]
    assert np.isnan(merged.evidence.probability).all()
