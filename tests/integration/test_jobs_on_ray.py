"""Replays spread over the tasks of a real local Ray."""

from __future__ import annotations

import numpy as np
import pytest

from jobs.simulation import Replayed, Scenario, simulate
from jobs.workers import InProcess, Workers, workers
from tests.support.trajectories import markov_answers
from valuspec.replay import filtered, unfiltered
from valuspec.thresholds import ThresholdSet

ANSWERS = markov_answers(60, 3, 24)
SELECTS = {"filtered": filtered(ThresholdSet.starting("any model")), "unfiltered": unfiltered}


def served(pool: Workers) -> dict[str, Replayed]:
    scenario = Scenario(range(40), range(40, 60), num_trees=4)
    parts = pool.map(
        lambda known, shard: simulate(known, shard, SELECTS),
        ANSWERS,
        scenario.shards(pool.num_shards),
        title="answers",
    )
    return {name: Replayed.concatenate([p[name] for p in parts]) for name in SELECTS}


@pytest.mark.ray
def test_tasks_give_what_this_process_gives(monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with workers(2) as pool:
        assert not isinstance(pool, InProcess)
        there = served(pool)
        again = served(pool)
    here = served(InProcess())
    for name in SELECTS:
        assert np.array_equal(here[name].steps_by_nodes, there[name].steps_by_nodes)
        assert np.array_equal(here[name].accepted, there[name].accepted)
        assert np.array_equal(again[name].accepted, there[name].accepted)


def test_no_ray_is_started_where_one_worker_is_enough(monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for count in (None, 1):
        with workers(count) as pool:
            assert isinstance(pool, InProcess)
