"""Embeddings and names of requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.embedding import EMBEDDING_DIM, embed
from retrieval.namespace import namespace, tree_id

PROMPTS = st.lists(st.integers(0, 200_000), min_size=1, max_size=200)


@given(PROMPTS)
def test_unit_vectors(prompt: list[int]) -> None:
    vector = embed(prompt)
    assert vector.dtype == np.float32
    assert vector.shape == (EMBEDDING_DIM,)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


@given(PROMPTS, st.randoms())
def test_order_does_not_matter(prompt: list[int], random) -> None:
    shuffled = random.sample(prompt, len(prompt))
    assert embed(shuffled) @ embed(prompt) == pytest.approx(1.0, abs=1e-5)


def test_equal_on_every_machine() -> None:
    """Vectors outlive the process that made them; raise EMBEDDING_VERSION if this must change."""
    vector = embed([1, 1, 49151])
    hot = np.flatnonzero(vector)
    expected = np.array([(1 + np.log(2)) * np.log(3), np.log(49153)])
    assert sorted(np.abs(vector[hot])) == pytest.approx(expected / np.linalg.norm(expected))
    assert hot.tolist() == [193, 451]


def test_shared_rare_tokens_weigh_more_than_shared_frequent_ones() -> None:
    request = [*range(10), *range(30_000, 30_010)]
    same_topic = [*range(20, 30), *range(30_000, 30_010)]
    same_template = [*range(10), *range(31_000, 31_010)]
    assert embed(request) @ embed(same_topic) > embed(request) @ embed(same_template) + 0.2


@pytest.mark.parametrize("prompt", [[], [-1]])
def test_nothing_to_embed(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="empty prompt or negative"):
        embed(prompt)


def test_namespaces_tell_every_part_apart() -> None:
    parts = [("a", "m", "t"), ("b", "m", "t"), ("a", "n", "t"), ("a", "m", "u"), ("am", "", "t")]
    names = {namespace(*each) for each in parts}
    assert len(names) == len(parts)
    assert all(len(name) == 24 and int(name, 16) >= 0 for name in names)
    assert namespace("ab", "c", "d") != namespace("a", "bc", "d")
    assert namespace("a", "m", "t") == namespace("a", "m", "t")


def test_tree_ids_are_positive_int64_and_depend_on_order() -> None:
    assert tree_id([1, 2]) == tree_id(np.array([1, 2], np.int32))
    assert tree_id([1, 2]) != tree_id([2, 1])
    assert all(0 <= tree_id([n]) < 2**63 for n in range(1000))
