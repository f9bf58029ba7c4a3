"""What every VectorIndex promises, checked against brute force."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from retrieval import faiss_index, segment
from retrieval.faiss_index import FaissIndex
from retrieval.index import InMemoryIndex, VectorIndex, top_k

DIM = 8
Factory = Callable[[int], VectorIndex]


@pytest.fixture(params=["memory", "flat", "ivf"])
def factory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Factory:
    # Small limits, so that a few dozen rows cross every boundary; an IVF that searches every
    # group misses nothing.
    monkeypatch.setattr(faiss_index, "TAIL_ROWS", 16)
    monkeypatch.setattr(segment, "_COPIED_ROWS", 8)
    if request.param == "ivf":
        monkeypatch.setattr(segment, "IVF_ROWS", 20)
        monkeypatch.setattr(segment, "ROWS_PER_CENTROID", 2)
        monkeypatch.setattr(segment, "PROBED_SHARE", 1)
    return InMemoryIndex if request.param == "memory" else FaissIndex


@pytest.fixture
def index(factory: Factory) -> VectorIndex:
    return factory(DIM)


def unit_vectors(rng: np.random.Generator, n: int, dim: int = DIM) -> np.ndarray:
    """Of numbers that half precision keeps as they are."""
    vectors = rng.standard_normal((n, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float16).astype(np.float32)


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


@pytest.mark.parametrize("seed", range(10))
def test_random_histories_match_brute_force(index: VectorIndex, seed: int) -> None:
    rng = np.random.default_rng(seed)
    known: dict[int, np.ndarray] = {}
    removed: set[int] = set()
    for _ in range(60):
        match rng.integers(4):
            case 0:
                ids = rng.choice(200, rng.integers(1, 12), replace=False)
                vectors = unit_vectors(np.random.default_rng(7), 200)[ids]  # one vector per id
                index.add(ids.astype(np.int64), vectors)
                known.update(zip(ids.tolist(), vectors, strict=True))
                removed.difference_update(ids.tolist())
            case 1:
                ids = rng.choice(250, rng.integers(1, 6), replace=False).tolist()
                index.remove(ids)
                removed.update(set(ids) & known.keys())
            case 2:
                index.compact()
            case 3:
                query, k = unit_vectors(rng, 1)[0], int(rng.integers(1, 20))
                present = {i: v @ query for i, v in known.items() if i not in removed}
                best = sorted(present, key=lambda i: -present[i])[:k]
                found = index.search(query, k)
                assert found.ids.tolist() == best
                assert found.scores == pytest.approx([present[i] for i in best], abs=1e-5)
        assert len(index) == len(known.keys() - removed)
        assert all((i in index) == (i in known and i not in removed) for i in range(250))


def test_an_empty_index_finds_nothing(index: VectorIndex) -> None:
    found = index.search(unit_vectors(np.random.default_rng(0), 1)[0], 5)
    assert found.ids.tolist() == []
    assert found.ids.dtype == np.int64
    assert len(index) == 0
    assert index.mean().tolist() == [0.0] * DIM
    assert index.oldest(3) == []
    index.remove([1, 2])


@pytest.mark.fault(14)
def test_asking_for_more_than_there_is(index: VectorIndex) -> None:
    vectors = unit_vectors(np.random.default_rng(0), 3)
    index.add(ids_of(5, 2**62, 0), vectors)
    found = index.search(vectors[1], 100)
    assert sorted(found.ids.tolist()) == [0, 5, 2**62]
    assert found.ids[0] == 2**62
    assert index.search(vectors[1], 0).ids.tolist() == []


@pytest.mark.fault(14)
def test_an_id_keeps_its_first_vector(index: VectorIndex) -> None:
    one, other = np.eye(DIM, dtype=np.float32)[:2]
    index.add(ids_of(1, 1), np.stack([one, other]))
    index.add(ids_of(1), other[None])
    found = index.search(one, 5)
    assert found.ids.tolist() == [1]
    assert found.scores.tolist() == [1.0]


def test_added_vectors_are_copied(index: VectorIndex) -> None:
    vectors = np.eye(DIM, dtype=np.float32)[:1].copy()
    index.add(ids_of(1), vectors)
    vectors[:] = 0
    assert index.search(np.eye(DIM, dtype=np.float32)[0], 1).scores.tolist() == [1.0]


def test_oldest_skips_removed_and_goes_by_the_last_addition(index: VectorIndex) -> None:
    vectors = unit_vectors(np.random.default_rng(0), 5)
    index.add(ids_of(9, 3, 7, 1, 5), vectors)
    index.remove([3])
    assert index.oldest(3) == [9, 7, 1]
    index.add(ids_of(9), vectors[:1])
    assert index.oldest(4) == [7, 1, 5, 9]


def test_compaction_loses_nothing_that_happens_beside_it(factory: Factory) -> None:
    """One thread compacts while another adds and removes."""
    index = factory(DIM)
    vectors = unit_vectors(np.random.default_rng(1), 3000)
    done = threading.Event()

    def compact() -> None:
        while not done.is_set():
            index.compact()

    compacting = threading.Thread(target=compact)
    compacting.start()
    for start in range(0, 3000, 10):
        index.add(np.arange(start, start + 10), vectors[start : start + 10])
        index.remove(list(range(start, start + 10, 3)))
        index.add(ids_of(start), vectors[start : start + 1])  # removed just now
    done.set()
    compacting.join()
    while index.compact():
        pass
    live = [n for n in range(3000) if n % 10 % 3 or n % 10 == 0]
    assert len(index) == len(live)
    query = unit_vectors(np.random.default_rng(2), 1)[0]
    found = index.search(query, len(live))
    assert sorted(found.ids.tolist()) == live
    assert found.scores == pytest.approx((vectors @ query)[found.ids], abs=1e-5)


def test_mean(index: VectorIndex) -> None:
    vectors = unit_vectors(np.random.default_rng(0), 40)
    for start in range(0, 40, 5):
        index.add(np.arange(start, start + 5), vectors[start : start + 5])
    assert index.mean() == pytest.approx(vectors.mean(axis=0), abs=1e-6)


@pytest.mark.parametrize(
    ("ids", "vectors", "message"),
    [
        (ids_of(1), np.zeros((1, DIM + 1), np.float32), r"float32 \[1, 9\].*float32 \[1, 8\]"),
        (ids_of(1), np.zeros((1, DIM), np.float64), r"float64"),
        (ids_of(1), np.zeros(DIM, np.float32), r"float32 \[8\]"),
        (ids_of(1, 2), np.zeros((1, DIM), np.float32), r"float32 \[2, 8\]"),
        (np.array([1], np.int32), np.zeros((1, DIM), np.float32), "ids must be int64"),
        (ids_of(-1), np.zeros((1, DIM), np.float32), "not negative"),
        (ids_of(1), np.full((1, DIM), np.nan, np.float32), "NaN"),
    ],
)
@pytest.mark.fault(13)
def test_wrong_vectors_are_refused_whole(index: VectorIndex, ids, vectors, message) -> None:
    with pytest.raises(ValueError, match=message):
        index.add(ids, vectors)
    assert len(index) == 0


@pytest.mark.parametrize(
    "query",
    [np.zeros(DIM + 1, np.float32), np.zeros(DIM, np.float64), np.full(DIM, np.nan, np.float32)],
)
@pytest.mark.fault(13)
def test_wrong_queries_are_refused(index: VectorIndex, query: np.ndarray) -> None:
    with pytest.raises(ValueError, match="query"):
        index.search(query, 1)


@pytest.mark.fault(15)
def test_searches_see_all_of_an_add_or_none(index: VectorIndex) -> None:
    """Batch b lies along axis b: a search along that axis finds 0 or 5 rows of score 1."""
    axes = np.eye(DIM, dtype=np.float32)
    done = threading.Event()
    seen: list[int] = []

    def search() -> None:
        while not done.is_set():
            for axis in axes:
                seen.append(int((index.search(axis, 5).scores > 0.5).sum()))

    reader = threading.Thread(target=search)
    reader.start()
    for batch, axis in enumerate(axes):
        ids = np.arange(5 * batch, 5 * batch + 5)
        index.add(ids, np.repeat(axis[None], 5, axis=0))
        index.remove([1000 + batch])
    done.set()
    reader.join()
    assert set(seen) <= {0, 5}
    assert all((index.search(axis, 5).scores == 1.0).all() for axis in axes)


@pytest.mark.fault(14)
def test_padding_and_nan_never_leave() -> None:
    """FAISS pads with id -1; a broken vector may score NaN."""
    scores = np.array([0.5, np.nan, 0.9, -np.inf, 0.7], np.float32)
    found = top_k(ids_of(3, 4, -1, 6, 7), scores, 10)
    assert found.ids.tolist() == [7, 3]


def test_a_search_of_some_groups_finds_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come in topics; an IVF reads the groups around the query's."""
    monkeypatch.setattr(segment, "IVF_ROWS", 1000)
    monkeypatch.setattr(faiss_index, "TAIL_ROWS", 200)
    rng = np.random.default_rng(3)
    topics = unit_vectors(rng, 50, 32)
    vectors = topics[rng.integers(0, 50, 4000)] + 0.3 * rng.standard_normal((4000, 32))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    index = FaissIndex(32)
    for start in range(0, 4000, 100):
        index.add(np.arange(start, start + 100), vectors[start : start + 100])
    while index.compact():
        pass
    queries = vectors[rng.integers(0, 4000, 50)]
    found = [set(index.search(query, 16).ids.tolist()) for query in queries]
    best = [set(np.argsort(-(vectors @ query))[:16].tolist()) for query in queries]
    recall = np.mean([len(f & b) / 16 for f, b in zip(found, best, strict=True)])
    assert 0.8 < recall < 1  # below 1, or nothing was left out and this tests nothing
