"""Calibration recovers known rates, and its report figures match their definitions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.support.trajectories import COST, markov_answers, stocked
from valuspec.calibration import calibrate, reliability, score
from valuspec.cost import CostStaircase
from valuspec.drafted import Drafted
from valuspec.drafting.drafter import Drafter
from valuspec.errors import ThresholdError
from valuspec.evidence import signatures
from valuspec.replay import filtered, plain, replay, steps, unfiltered

HISTORY, CALIBRATION, TEST = markov_answers(30, 1), markov_answers(30, 2), markov_answers(30, 3)
DEAR = CostStaircase((1, 2), (0.02, 0.2))


def test_transfers_are_counted_by_their_definition() -> None:
    drafter = stocked(HISTORY)
    drafted = Drafted(CALIBRATION[:3], drafter)
    seen, taken = drafted.transfers(drafted.walk(None))
    expected_seen: dict[int, int] = {}
    expected_taken: dict[int, int] = {}
    for trajectory in CALIBRATION[:3]:
        for step in steps(trajectory, drafter, unfiltered):
            tree, answer = step.candidate.tree, step.future.tolist()
            codes = signatures(step.candidate.evidence).tolist()
            for node, code in enumerate(codes):
                path, above = [], int(tree.parents[node])
                while above >= 0:
                    path.insert(0, int(tree.tokens[above]))
                    above = int(tree.parents[above])
                if path == answer[: len(path)] and len(path) < len(answer):
                    expected_seen[code] = expected_seen.get(code, 0) + 1
                    if tree.tokens[node] == answer[len(path)]:
                        expected_taken[code] = expected_taken.get(code, 0) + 1
    assert {c: n for c, n in enumerate(seen.tolist()) if n} == expected_seen
    assert {c: n for c, n in enumerate(taken.tolist()) if n} == expected_taken


def test_a_calibrated_set_pays_on_other_trajectories_and_foretells_acceptance() -> None:
    drafter = stocked(HISTORY)
    made = calibrate(
        CALIBRATION, drafter, {1: COST}, model_fingerprint="m", provenance={"of": "test"}
    )
    speeds = {
        name: replay(TEST, drafter, select, COST).tok_s
        for name, select in {
            "plain": plain, "unfiltered": unfiltered, "filtered": filtered(made)
        }.items()
    }  # fmt: skip
    assert speeds["filtered"] > 1.5 * speeds["plain"]
    assert speeds["filtered"] > 1.1 * speeds["unfiltered"]
    report = reliability(TEST, drafter, made)
    assert report.expected_calibration_error < 0.03
    assert report.auc > 0.8
    assert sum(report.bin_sizes) == report.num_nodes > 1000
    assert made.provenance == {"of": "test"}


def test_no_tree_is_chosen_where_rows_are_dear() -> None:
    drafter = stocked(HISTORY)
    made = calibrate(
        CALIBRATION, drafter, {1: COST, 64: DEAR}, model_fingerprint="m", provenance={}
    )
    busy = replay(TEST, drafter, filtered(made, batch_size=64), DEAR)
    assert busy.num_draft_tokens == 0
    assert replay(TEST, drafter, filtered(made, batch_size=1), COST).num_draft_tokens > 0


def test_the_same_trajectories_give_the_same_set() -> None:
    versions = {
        calibrate(
            CALIBRATION[:10], stocked(HISTORY), {1: COST}, model_fingerprint="m", provenance={}
        ).version
        for _ in range(2)
    }
    assert len(versions) == 1


def test_too_little_to_learn_from_is_said() -> None:
    with pytest.raises(ThresholdError, match="labelled edges"):
        calibrate([], Drafter(), {1: COST}, model_fingerprint="m", provenance={})


# -- figures --------------------------------------------------------------------------------------


def test_auc_is_the_chance_of_ranking_an_accepted_node_higher() -> None:
    rng = np.random.default_rng(0)
    value = rng.integers(0, 6, 40) / 6
    outcome = rng.random(40) < value
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for (a, yes), (b, no) in product(zip(value, outcome, strict=True), repeat=2)
        if yes and not no
    ]
    assert score(value, outcome).auc == pytest.approx(np.mean(pairs))


def test_calibration_error_and_brier_by_hand() -> None:
    value = np.array([0.05, 0.05, 0.95, 1.0])
    outcome = np.array([False, True, True, True])
    report = score(value, outcome)
    assert report.bin_sizes == (2, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert report.expected_calibration_error == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)
    assert report.brier == pytest.approx((0.05**2 + 0.95**2 + 0.05**2) / 4)
    assert np.isnan(score(value, np.ones(4, bool)).auc)
