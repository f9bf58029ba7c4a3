"""Verify costs of a machine: estimated, held to live forwards, and used in place of a set's own."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.support.trajectories import SLOPED
from valuspec.cost import CONTEXT, MIN_STEPS, WINDOW, CostStaircase, LiveCosts
from valuspec.errors import ThresholdError
from valuspec.thresholds import MAX_NODES, ThresholdSet

COST = CostStaircase((1, 4, 16, 64), (0.02, 0.024, 0.04, 0.12))


def live(costs: dict[int, CostStaircase], *forwards: tuple[int, int, float]) -> LiveCosts:
    """After MIN_STEPS of each (batch size, rows in all, seconds)."""
    made = LiveCosts(costs)
    for batch_size, num_rows, seconds in forwards:
        for _ in range(MIN_STEPS):
            made.add(batch_size=batch_size, num_rows=num_rows, context=0, seconds=seconds)
    return made


def test_without_forwards_the_measured_costs_stand() -> None:
    assert LiveCosts({1: COST}).current() == {1: COST}
    few = LiveCosts({1: COST})
    for _ in range(MIN_STEPS - 1):
        few.add(batch_size=1, num_rows=4, context=0, seconds=9.0)
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
    for _ in range(MIN_STEPS):
        costs.add(batch_size=1, num_rows=4, context=0, seconds=7.0)
    assert costs.current()[1].seconds == pytest.approx(COST.seconds)
    for _ in range(WINDOW):
        costs.add(batch_size=1, num_rows=4, context=0, seconds=0.048)
    assert costs.current()[1].seconds[1] == pytest.approx(0.048)


def test_rows_count_per_request_and_batch_sizes_apart() -> None:
    costs = live({1: COST, 4: COST}, (4, 16, 0.072), (3, 3, 9.0), (8, 8, 9.0)).current()
    assert costs[1] == COST
    assert costs[4].seconds == pytest.approx([3 * s for s in COST.seconds])


def test_live_costs_never_fall_with_more_rows() -> None:
    rng = np.random.default_rng(0)
    costs = LiveCosts({1: COST})
    for rows in rng.integers(1, 100, 2 * WINDOW).tolist():
        costs.add(batch_size=1, num_rows=rows, context=0, seconds=float(rng.uniform(0.01, 0.3)))
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


# -- drafts


def test_drafting_is_known_apart_from_the_rest_of_a_step() -> None:
    costs = LiveCosts({1: SLOPED, 2: SLOPED})
    for drafting in (0.001, 0.003, 0.0):  # in the last steps nobody drafts
        for _ in range(MIN_STEPS):
            seconds = 2 * SLOPED.seconds[0] + drafting
            costs.add(batch_size=1, num_rows=1, context=0, seconds=seconds, drafting=drafting)
    found = costs.current()
    assert found[1].drafting == pytest.approx(0.002)
    assert found[1].seconds == pytest.approx([2 * s for s in SLOPED.seconds])
    assert found[2] == SLOPED
    costs.add(batch_size=2, num_rows=2, context=0, seconds=9.0, drafting=9.0)
    assert costs.current()[2] == SLOPED, "one step says nothing"
    assert SLOPED.of_batch(4, (1, 4)).drafting == pytest.approx(4 * SLOPED.drafting)


# -- contexts


def test_a_context_costs_by_token_and_by_row() -> None:
    assert SLOPED.extra(5, CONTEXT) == SLOPED.extra(5, 0) == 0
    assert SLOPED.extra(5, CONTEXT + 100) == pytest.approx(100 * (2e-5 + 5e-5))
    both = SLOPED.extra(np.array([1, 2]), np.array([CONTEXT + 10, CONTEXT + 20]))
    assert both == pytest.approx([3e-4, 8e-4])
    assert SLOPED.of_batch(4, (1, 4)).extra(2, CONTEXT + 1) == pytest.approx(4 * (2e-5 + 2e-5))


def test_slopes_are_found_from_two_contexts() -> None:
    rows = (1, 8, 16)
    more = SLOPED.extra(np.array(rows), 1536).tolist()
    found = replace(SLOPED, per_token=0.0, per_key=0.0).with_context(1536, rows, more)
    assert (found.per_token, found.per_key) == pytest.approx((2e-5, 1e-5))
    noise = COST.with_context(1536, rows, [0.002, 0.001, 0.0])  # more rows, less time
    assert (noise.per_token > 0, noise.per_key) == (True, 0.0)


def test_forwards_behind_long_contexts_do_not_look_slow() -> None:
    costs = LiveCosts({2: SLOPED})
    for _ in range(MIN_STEPS):
        seconds = SLOPED.table(8)[7] + float(SLOPED.extra(8, 1000))
        costs.add(batch_size=2, num_rows=16, context=2000, seconds=3 * seconds)
    found = costs.current()[2]
    assert found.seconds == pytest.approx([3 * s for s in SLOPED.seconds])
    assert found.extra(8, 1000) == pytest.approx(3 * SLOPED.extra(8, 1000))


def test_slopes_are_kept_and_are_never_negative() -> None:
    assert CostStaircase.from_json(SLOPED.to_json()) == SLOPED
    assert COST.to_json().keys() == {"rows", "seconds"}  # a set without slopes stays as it was
    for name in ("per_key", "drafting"):
        with pytest.raises(ThresholdError, match="negative"):
            CostStaircase.from_json(SLOPED.to_json() | {name: -1e-6})


@pytest.mark.parametrize("batch_size", [1, 6])
@pytest.mark.parametrize("context", [0, CONTEXT, 300, 2000])
def test_a_price_is_what_a_stream_would_do_in_the_time(shipped, batch_size, context) -> None:
    local = on(shipped, {8: SLOPED})
    bucket = local.bucket_index(batch_size)
    rows = np.arange(1, MAX_NODES + 2)
    seconds = SLOPED.table(MAX_NODES + 1) + SLOPED.extra(rows, context)
    near = local.tokens_of(SLOPED.seconds[0], batch_size=batch_size)  # in a plain step
    scale, slope = local.prices_behind(bucket, context)
    prices = scale * local.prices[bucket] + slope * (rows - 1)
    assert prices == pytest.approx(near * (seconds - seconds[0]) / seconds[0])
    assert local.plain_step_s(batch_size, context) == pytest.approx(seconds[0])


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
