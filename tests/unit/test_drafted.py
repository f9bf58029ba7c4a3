"""Drafted once, replayed often: the same steps as decoding anew, and nothing known ahead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trajectories import (
    COST,
    SLOPED,
    behind_long_prompts,
    markov_answers,
    stocked,
)
from valuspec import valuation
from valuspec.calibration import calibrate
from valuspec.cost import CostStaircase
from valuspec.drafted import Drafted
from valuspec.drafting.drafter import Drafter
from valuspec.replay import Trajectory, filtered, labels, offers, replay, steps, unfiltered
from valuspec.thresholds import BatchBucket, ThresholdSet
from valuspec.tree import DraftTree

SHIPPED = ThresholdSet.starting("any model")


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tau=st.floats(0, 0.4),
    tok_s=st.floats(1, 500),
    cost=st.sampled_from([COST, SLOPED]),
)
def test_steps_are_those_of_decoding_anew(
    seed: int, tau: float, tok_s: float, cost: CostStaircase
) -> None:
    history, tests = markov_answers(12, seed), behind_long_prompts(markov_answers(4, seed + 1))
    trees = (DraftTree.from_paths([h.output_ids.tolist() for h in history[:2]]),)
    tests[0] = replace(tests[0], retrieved=trees)
    tests[1] = replace(tests[1], output_ids=tests[1].output_ids[:1])  # prefill did it all
    drafter = stocked(history)
    drafted = Drafted(tests, drafter)
    used = replace(SHIPPED, buckets=(BatchBucket(1, tau, tok_s, cost),))
    for thresholds, select in ((used, filtered(used)), (None, unfiltered)):
        walk = drafted.walk(thresholds)
        anew = [step for t in tests for step in steps(t, drafter, select)]
        assert walk.kept.tolist() == [len(step.kept) for step in anew]
        assert walk.accepted.tolist() == [step.num_accepted for step in anew]
        assert walk.tok_s(cost) == pytest.approx(replay(tests, drafter, select, cost).tok_s)
        value, taken = drafted.outcomes(walk, used)
        assert value.tolist() == [
            v for s in anew for v in valuation.values(s.candidate, used).tolist()
        ]
        assert taken.tolist() == [
            t for s in anew for t in labels(s.candidate, s.future)[1].tolist()
        ]


def test_the_bucket_of_the_batch_decides() -> None:
    drafted = Drafted(markov_answers(4, 5), stocked(markov_answers(20, 1)))
    nothing = BatchBucket(8, 1.0, 50.0, COST)
    used = replace(SHIPPED, buckets=(BatchBucket(1, 0.0, 50.0, COST), nothing))
    assert drafted.walk(used, batch_size=1).kept.sum() > 0
    assert drafted.walk(used, batch_size=2).kept.sum() == 0


def test_no_trajectories_are_no_steps() -> None:
    drafted = Drafted([], Drafter())
    walk = drafted.walk(SHIPPED)
    assert (len(walk.kept), walk.num_tokens, walk.tok_s(COST)) == (0, 0, 0.0)
    assert drafted.transfers(walk)[0].sum() == 0


# -- leakage --------------------------------------------------------------------------------------


def offered(trajectory: Trajectory, drafter: Drafter) -> list[list[tuple[float, ...]]]:
    """Token, parent and evidence of every node, by position."""
    return [
        list(zip(c.tree.tokens.tolist(), c.tree.parents.tolist(),
                 c.evidence.share.tolist(), c.evidence.match_length.tolist(),
                 np.nan_to_num(c.evidence.own_share, nan=-1).tolist(), strict=True))
        for c, _ in offers(trajectory, drafter)
    ]  # fmt: skip


def test_what_is_offered_and_its_evidence_do_not_depend_on_the_future() -> None:
    one = markov_answers(1, 5)[0]
    drafter = stocked(markov_answers(20, 1))
    for known in (1, 17, 40):
        other = replace(one, output_ids=np.append(one.output_ids[:known], np.full(30, 39, "i4")))
        assert offered(one, drafter)[:known] == offered(other, drafter)[:known]
    assert offered(one, drafter)[45] != offered(other, drafter)[45]  # there was a difference to see


def test_trajectories_of_one_calibration_do_not_meet() -> None:
    """Nor does one meet itself: offers to each are those of a drafter that has seen no other."""
    tests, history = markov_answers(6, 5), markov_answers(20, 1)
    together = Drafted([*tests, *tests], stocked(history)).walk(SHIPPED)
    alone = [Drafted([t], stocked(history)).walk(SHIPPED) for t in tests]
    assert together.kept.tolist() == 2 * [k for walk in alone for k in walk.kept.tolist()]


def test_calibrating_leaves_the_store_as_it_was() -> None:
    tests, drafter = markov_answers(20, 5), stocked(markov_answers(20, 1))
    before = offered(tests[0], drafter)
    calibrate(tests, drafter, {1: COST}, model_fingerprint="m", provenance={})
    assert offered(tests[0], drafter) == before


def test_an_answer_that_meets_itself_is_told_from_one_that_does_not() -> None:
    """The leak these tests guard against would show: values near one and next to no steps."""
    tests = markov_answers(6, 5)
    honest = Drafted(tests, stocked(markov_answers(20, 1))).walk(None)
    leaking = Drafted(tests, stocked(tests)).walk(None)
    assert len(leaking.kept) < 0.6 * len(honest.kept)
