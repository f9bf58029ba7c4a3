"""The order of earlier answers, their division, and the retrieval that is simulated on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.history import (
    MAX_PART,
    MIN_TENANT_ANSWERS,
    Answers,
    SimulatedRetrieval,
    Split,
    capped,
    retrieve,
    tenant_weights,
)
from retrieval.trajectory_log.codec import encode
from tests.support.log_rows import ids, logged
from tests.support.trajectories import COST, markov_answers


@given(st.integers(0, 20_000))
def test_parts_follow_each_other_and_share_no_answer(size: int) -> None:
    split = Split.of(size)
    parts = [*split.history, *split.calibration, *split.evaluation]
    assert parts == list(range(size))
    assert max(len(split.calibration), len(split.evaluation)) <= MAX_PART
    assert len(split.history) >= len(split.evaluation)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=400))
def test_no_tenant_outweighs_all_others(names: list[str]) -> None:
    totals: Counter[str] = Counter()
    for name, weight in zip(names, tenant_weights(names), strict=True):
        assert 0 < weight <= 1
        totals[name] += weight
    *others, most = sorted(totals.values())
    assert len(totals) == 1 or most <= max(MIN_TENANT_ANSWERS, sum(others)) + 1e-6


def test_a_tenant_with_nearly_all_of_the_log_is_thinned_evenly() -> None:
    rows = [
        replace(t, namespace="small" if i % 10 == 0 else "large", max_tokens=i)
        for i, t in enumerate(markov_answers(1, 1, 4) * 1000)
    ]
    kept = capped(rows)
    counts = Counter(t.namespace for t in kept)
    assert counts["small"] == 100
    assert counts["large"] == pytest.approx(100, abs=1)
    times = [t.max_tokens for t in kept if t.namespace == "large"]
    assert times == sorted(times)
    assert max(np.diff(times)) < 15


def test_a_tenant_alone_is_not_thinned() -> None:
    rows = markov_answers(1, 1, 4) * 300
    assert len(capped(rows)) == 300
    assert tenant_weights(["a"] * 300).tolist() == [1.0] * 300


def test_a_log_gives_the_newest_models_answers(tmp_path: Path) -> None:
    old = [logged(n, model_fingerprint="old") for n in range(3)]
    new = [logged(n, model_fingerprint="new") for n in range(3, 5)]
    single = logged(9, model_fingerprint="new", output_ids=ids(7), kept=ids(), accepted=ids(),
                    batch_size=ids(), decode_s=0.0)  # fmt: skip
    (tmp_path / "a.parquet").write_bytes(encode([*old, *new, single], {1: COST}))
    answers = Answers.from_log([tmp_path])
    assert answers.model_fingerprint == "new"
    assert [t.prompt_ids.tolist() for t in answers.trajectories] == [[1, 2, 3], [1, 2, 4]]
    assert answers.costs == {1: COST}
    assert answers.steps_by_batch == {1: 2, 2: 2}
    assert answers.skipped["row.other_model"] == 3
    assert answers.measured.startswith("40.0 tokens per second a stream, 2.00 tokens and 2.0 nodes")
    assert len(Answers.from_log([tmp_path], "old").trajectories) == 3


def test_of_a_long_log_the_newest_answers_count(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("jobs.history.MAX_ANSWERS", 2)
    (tmp_path / "a.parquet").write_bytes(encode([logged(n) for n in range(5)], {}))
    answers = Answers.from_log([tmp_path])
    assert [t.prompt_ids.tolist() for t in answers.trajectories] == [[1, 2, 3], [1, 2, 4]]
    assert answers.skipped == {"row.older": 3}


def test_an_empty_log_is_no_error(tmp_path: Path) -> None:
    answers = Answers.from_log([tmp_path, tmp_path / "missing.parquet"])
    assert answers.trajectories == []
    assert answers.measured == "unknown"


def test_retrieval_finds_earlier_answers_of_the_tenant_and_no_others() -> None:
    first, second = markov_answers(2, 1, 8)
    with SimulatedRetrieval(vocab_size=40) as retrieval:
        assert retrieval.lookup(first, 4) == ()
        retrieval.add(first)
        retrieval.add(replace(second, namespace="other"))
        (found,) = retrieval.lookup(first, 4)
        assert found.tokens.tolist() == first.output_ids.tolist()
        assert retrieval.lookup(replace(first, namespace="stranger"), 4) == ()


def test_queries_see_the_whole_history_and_not_each_other() -> None:
    history, queries = markov_answers(5, 1, 8), markov_answers(3, 2, 8)
    found = retrieve(history, queries, 40, k=6)
    assert [len(trees) for trees in found] == [5, 5, 5]
