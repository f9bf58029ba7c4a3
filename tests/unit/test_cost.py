"""Verify costs of a machine: estimated, held to live forwards, and used in place of a set's own."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from valuspec.cost import MIN_FORWARDS, WINDOW, CostStaircase, LiveCosts
from valuspec.errors import ThresholdError
from valuspec.thresholds import ThresholdSet

COST = CostStaircase((1, 4, 16, 64), (0.02, 0.024, 0.04, 0.12))


def live(costs: dict[int, CostStaircase], *forwards: tuple[int, int, float]) -> LiveCosts:
    """After MIN_FORWARDS of each (batch size, rows in all, seconds)."""
    made = LiveCosts(costs)
    for batch_size, num_rows, seconds in forwards:
        for _ in range(MIN_FORWARDS):
            made.add(batch_size=batch_size, num_rows=num_rows, seconds=seconds)
    return made


def test_without_forwards_the_measured_costs_stand() -> None:
    assert LiveCosts({1: COST}).current() == {1: COST}
    few = LiveCosts({1: COST})
    for _ in range(MIN_FORWARDS - 1):
        few.add(batch_size=1, num_rows=4, seconds=9.0)
    assert few.current() == {1: COST}


def test_forwards_correct_the_points_they_are_near_to() -> None:
    cost = live({1: COST}, (1, 1, 0.02), (1, 5, 0.05), (1, 60, 0.24)).current()[1]
    predicted = np.interp([5, 60], COST.rows, COST.seconds)
    assert cost.seconds[0] == pytest.approx(0.02)
    assert cost.seconds[1] == pytest.approx(0.024 * 0.05 / predicted[0])
    assert cost.seconds[3] == pytest.approx(0.12 * 0.24 / predicted[1])
    between = cost.seconds[2] / COST.seconds[2]
    assert 0.05 / predicted[0] < between < 0.24 / predicted[1]


def test_a_machine_twice_as_slow_is_twice_as_slow_everywhere() -> None:
    cost = live({1: COST}, (1, 4, 0.048)).current()[1]
    assert cost.seconds == pytest.approx([2 * s for s in COST.seconds])


def test_stray_forwards_change_nothing_and_old_ones_are_forgotten() -> None:
    costs = live({1: COST}, *[(1, 4, 0.024)] * 4)
    for _ in range(MIN_FORWARDS):
        costs.add(batch_size=1, num_rows=4, seconds=7.0)
    assert costs.current()[1].seconds == pytest.approx(COST.seconds)
    for _ in range(WINDOW):
        costs.add(batch_size=1, num_rows=4, seconds=0.048)
    assert costs.current()[1].seconds[1] == pytest.approx(0.048)


def test_rows_count_per_request_and_batch_sizes_apart() -> None:
    costs = live({1: COST, 4: COST}, (4, 16, 0.072), (3, 3, 9.0), (8, 8, 9.0)).current()
    assert costs[1] == COST
    assert costs[4].seconds == pytest.approx([3 * s for s in COST.seconds])


def test_live_costs_never_fall_with_more_rows() -> None:
    rng = np.random.default_rng(0)
    costs = LiveCosts({1: COST})
    for rows in rng.integers(1, 100, 2 * WINDOW).tolist():
        costs.add(batch_size=1, num_rows=rows, seconds=float(rng.uniform(0.01, 0.3)))
    seconds = costs.current()[1].seconds
    assert list(seconds) == sorted(seconds)


def test_a_larger_batch_is_estimated_by_the_sum_of_rows() -> None:
    assert COST.of_batch(4, (1, 4, 16)).seconds == pytest.approx((0.024, 0.04, 0.12))


def test_measuring_ends_in_time_but_not_before_one_turn() -> None:
    asked: list[int] = []
    cost = CostStaircase.measure(
        lambda n: asked.append(n) or 0.01 * n, (1, 2), repeats=5, until=time.perf_counter() - 1
    )
    assert asked == [2, 1, 1, 2]  # warm-up, then one turn behind a small one
    assert cost.seconds == (0.01, 0.02)


@pytest.mark.parametrize("data", [{}, {"rows": 3, "seconds": 4}, {"rows": ["x"], "seconds": [1]}])
def test_what_is_no_staircase_is_refused(data) -> None:
    assert CostStaircase.from_json(COST.to_json()) == COST
    with pytest.raises(ThresholdError):
        CostStaircase.from_json(data)


# -- a threshold set on another machine


@pytest.fixture(scope="module")
def shipped() -> ThresholdSet:
    return ThresholdSet.starting("model")


def on(shipped: ThresholdSet, costs: dict[int, CostStaircase]) -> ThresholdSet:
    return replace(shipped, local_costs=costs)


def test_local_costs_are_no_part_of_a_set(shipped) -> None:
    local = on(shipped, {1: COST})
    assert local.version == shipped.version
    assert local.to_json() == shipped.to_json()


def test_a_machine_of_another_speed_but_the_same_shape_keeps_the_prices(shipped) -> None:
    faster = {
        b.max_batch_size: CostStaircase(b.cost.rows, tuple(s / 10 for s in b.cost.seconds))
        for b in shipped.buckets
    }
    assert on(shipped, faster).prices == pytest.approx(shipped.prices)
    assert on(shipped, faster).plain_step_s(1) == pytest.approx(shipped.plain_step_s(1) / 10)


def test_where_rows_are_dearer_nodes_have_to_bring_more(shipped) -> None:
    steep = {
        b.max_batch_size: CostStaircase((1, 2), (b.cost.seconds[0], 3 * b.cost.seconds[0]))
        for b in shipped.buckets
    }
    assert np.all(on(shipped, steep).prices[:, 1:] > shipped.prices[:, 1:])


def test_every_bucket_finds_the_nearest_batch_size(shipped) -> None:
    small, large = CostStaircase((1, 2), (1.0, 2.0)), CostStaircase((1, 2), (3.0, 4.0))
    local = on(shipped, {1: small, 4: large})
    assert [local.plain_step_s(b) for b in (1, 2, 4, 8)] == [1.0, 3.0, 3.0, 3.0]
