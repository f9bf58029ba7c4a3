"""Serving known answers again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jobs.simulation import Replayed, Scenario, examine, simulate
from tests.support.trajectories import COST, SLOPED, behind_long_prompts, markov_answers, stocked
from valuspec.cost import CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.replay import MAX_NODES, Select, filtered, oracle, plain, replay, unfiltered
from valuspec.thresholds import ThresholdSet

THRESHOLDS = ThresholdSet.starting("any model")
SELECTS: dict[str, Select] = {
    "plain": plain,
    "unfiltered": unfiltered,
    "filtered": filtered(THRESHOLDS),
    "oracle": oracle,
}
ANSWERS = markov_answers(24, 3, 30)
LONG = behind_long_prompts(ANSWERS)


@pytest.mark.parametrize("live", [False, True])
def test_counts_are_those_of_replay(live: bool) -> None:
    scenario = Scenario(range(16), range(16, 24), live=live, num_trees=0)
    served = simulate(ANSWERS, scenario, SELECTS)
    for name, select in SELECTS.items():
        drafter = Drafter()
        for t in ANSWERS[:16]:
            drafter.remember(t.namespace, t.prompt_ids, t.output_ids)
        tally = replay(ANSWERS[16:], drafter, select, COST, remember=live)
        found = served[name]
        assert found.tokens.sum() == tally.num_tokens
        assert found.accepted.sum() == tally.num_accepted_tokens
        assert found.steps_by_nodes.sum() == tally.num_steps
        assert found.seconds(COST).sum() == pytest.approx(tally.seconds)
        assert found.mean_acceptance_length == pytest.approx(tally.mean_acceptance_length)
        assert found.nodes_per_step == pytest.approx(tally.nodes_per_step)
        assert found.offered_per_step == pytest.approx(tally.num_offered_nodes / tally.num_steps)


@pytest.mark.parametrize("cost", [COST, SLOPED])
def test_times_behind_long_contexts_are_those_of_replay(cost: CostStaircase) -> None:
    served = simulate(LONG, Scenario(range(16), range(16, 24), live=False, num_trees=0), SELECTS)
    drafter = stocked(LONG[:16])
    for name, select in SELECTS.items():
        tally = replay(LONG[16:], drafter, select, cost)
        drafts = cost.drafting * tally.num_steps if name == "plain" else 0  # and keeps none
        assert served[name].seconds(cost).sum() == pytest.approx(tally.seconds + drafts)
        plainly = replay(LONG[16:], drafter, plain, cost).seconds
        assert served[name].plain_seconds(cost).sum() == pytest.approx(plainly)
    assert served["plain"].speedup(replace(cost, drafting=0.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_shards_together_give_the_whole(live: bool, count: int) -> None:
    scenario = Scenario(range(2, 12), range(12, 24), live=live, num_trees=4)
    whole = simulate(ANSWERS, scenario, SELECTS)
    parts = [simulate(ANSWERS, shard, SELECTS) for shard in scenario.shards(count)]
    assert len(parts) == min(count, 12)
    for name in SELECTS:
        joined = Replayed.concatenate([part[name] for part in parts])
        assert np.array_equal(joined.steps_by_nodes, whole[name].steps_by_nodes)
        assert np.array_equal(joined.accepted, whole[name].accepted)
    nodes = examine(ANSWERS, scenario, THRESHOLDS, SELECTS["filtered"])
    assert nodes.kept.sum() == int(
        whole["filtered"].steps_by_nodes.sum(0) @ np.arange(MAX_NODES + 1)
    )
    assert (nodes.kept & nodes.taken).sum() >= whole["filtered"].accepted.sum()


@pytest.mark.parametrize("num_trees", [0, 4])
def test_an_answer_meets_earlier_ones_and_never_itself(num_trees: int) -> None:
    """The same request twice: the first time nothing is known, the second time everything."""
    rng = np.random.default_rng(0)
    fresh = replace(ANSWERS[0], output_ids=rng.permutation(30).astype(np.int32), max_tokens=30)
    twice = Scenario(range(0), range(2), num_trees=num_trees)
    accepted = simulate([fresh, fresh], twice, {"all": unfiltered})["all"].accepted
    assert accepted[0] == 0
    assert accepted[1] > 20
    frozen = replace(twice, live=False)
    assert simulate([fresh, fresh], frozen, {"all": unfiltered})["all"].accepted.tolist() == [0, 0]


def test_speedups_and_weights() -> None:
    scenario = Scenario(range(16), range(16, 24))
    served = simulate(ANSWERS, scenario, SELECTS)
    assert served["plain"].speedup(COST) == pytest.approx(1.0)
    assert served["oracle"].speedup(COST) >= served["filtered"].speedup(COST) > 1
    first = np.zeros(8)
    first[0] = 1
    alone = simulate(ANSWERS, replace(scenario, queries=range(16, 17)), SELECTS)["filtered"]
    assert served["filtered"].speedup(COST, first) == pytest.approx(alone.speedup(COST))
