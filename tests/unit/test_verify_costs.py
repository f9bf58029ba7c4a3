"""Measuring verify costs at the start, and keeping them for the next one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engines import engine_of, request, run
from tests.support.tiny_models import tiny_target
from valuspec.cost import MIN_STEPS, ROWS, STAIRS, CostStaircase
from valuspec.engine import cost_cache, measure
from valuspec.engine.cost_cache import live_costs
from valuspec.engine.measure import MAX_ROWS, MeasuredCosts, measure_costs
from valuspec.engine.target import Target

pytestmark = pytest.mark.usefixtures("one_thread")
COSTS = {1: CostStaircase((1, 2), (0.01, 0.02))}
MEASURED = MeasuredCosts(COSTS, running_share=1.0)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def test_every_power_of_two_and_the_largest_batch_get_a_staircase(target) -> None:
    costs, running_share = measure_costs(target, 6, budget_s=0.2)
    assert 0 < running_share <= 1.01
    assert list(costs) == [1, 2, 4, 6]
    assert costs[1].rows == tuple(sorted(ROWS + STAIRS))
    for size, cost in costs.items():
        assert cost.rows[:2] == (1, 2)
        assert cost.rows[-1] * size <= MAX_ROWS
    assert list(measure_costs(target, 1, budget_s=0).costs) == [1]


def test_without_time_larger_batches_are_estimated(target, monkeypatch) -> None:
    sizes = set()
    forward = measure._Batch.forward

    def watched(self, batch_size: int, num_rows: int) -> float:
        sizes.add(batch_size)
        return forward(self, batch_size, num_rows)

    monkeypatch.setattr(measure._Batch, "forward", watched)
    costs = measure_costs(target, 8, budget_s=0).costs
    assert sizes == {1}
    assert costs[8].seconds[:2] == pytest.approx(costs[1].table(16)[[7, 15]])


def test_costs_are_measured_once_per_machine(target, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: MEASURED)
    assert live_costs(target, 4).current() == COSTS
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: pytest.fail("again"))
    assert live_costs(target, 4).current() == COSTS


@pytest.mark.parametrize(
    "changed", ["model_fingerprint", "dtype", "processor", "num_threads", "arithmetic", "versions"]
)
def test_costs_of_another_model_or_machine_are_refused(
    changed, target, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: MEASURED)
    live_costs(target, 4)
    (kept,) = Path(tmp_path).rglob("*.json")
    content = json.loads(kept.read_text())
    content["of"][changed] = "another"
    kept.write_text(json.dumps(content))
    other = {1: CostStaircase((1, 2), (0.3, 0.4))}
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: MeasuredCosts(other, 1.0))
    assert live_costs(target, 4).current() == other
    # And a subject of its own has a file of its own.
    described = cost_cache.describe(target)
    monkeypatch.setattr(cost_cache, "describe", lambda target: described | {changed: "another"})
    live_costs(target, 4)
    assert len(list(Path(tmp_path).rglob("*.json"))) == 2


def test_what_live_forwards_taught_is_there_at_the_next_start(
    target, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: MEASURED)
    busy = live_costs(target, 4)
    (kept,) = Path(tmp_path).rglob("*.json")
    written = kept.stat().st_mtime_ns
    busy.close()  # nothing was learned
    assert kept.stat().st_mtime_ns == written
    for _ in range(MIN_STEPS):
        busy.add(batch_size=1, num_rows=1, context=0, seconds=0.005)
    busy.close()
    assert live_costs(target, 4).current()[1].seconds == pytest.approx((0.005, 0.01))


def test_costs_of_a_busy_machine_are_used_but_not_kept(target, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path))
    busy = MeasuredCosts(COSTS, running_share=0.2)
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: busy)
    costs = live_costs(target, 4)
    assert costs.current() == COSTS
    assert not list(Path(tmp_path).rglob("*.json"))
    for _ in range(MIN_STEPS):
        costs.add(batch_size=1, num_rows=1, context=0, seconds=0.005)
    costs.close()
    assert live_costs(target, 4).current()[1].seconds == pytest.approx((0.005, 0.01))


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"of": 1', '{"of": null, "costs": 3}'])
def test_a_damaged_file_is_measured_again(damage, target, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: MEASURED)
    live_costs(target, 4)
    (kept,) = Path(tmp_path).rglob("*.json")
    kept.write_text(damage)
    assert live_costs(target, 4).current() == COSTS
    assert json.loads(kept.read_text())["of"]["dtype"] == "float32"


def test_a_cache_that_cannot_be_written_costs_only_the_next_start(
    target, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cost_cache, "measure_costs", lambda target, size: MEASURED)
    assert live_costs(target, 4).current() == COSTS


def test_long_contexts_are_measured_as_far_as_the_model_can_see(target, monkeypatch) -> None:
    """Forwards that take 1 ms, a microsecond for each token and two for each row and token."""
    monkeypatch.setattr(target, "max_model_len", 1024)
    monkeypatch.setattr(measure, "_drafting", lambda batch: 3e-3)
    monkeypatch.setattr(
        measure._Batch,
        "forward",
        lambda batch, size, rows: 1e-3 + 1e-6 * size * batch._context * (1 + 2 * rows),
    )
    for size, cost in measure_costs(target, 4).costs.items():
        assert (cost.per_token, cost.per_key) == pytest.approx((size * 1e-6, size * 2e-6))
        assert cost.drafting == pytest.approx(size * 3e-3)
    cost = measure.measure_cost(target, batch_size=2)
    assert (cost.per_token, cost.per_key) == pytest.approx((2e-6, 4e-6))
    monkeypatch.setattr(target, "max_model_len", 400)
    cost = measure.measure_cost(target)
    assert (cost.per_token, cost.per_key) == (0, 0)


def test_drafting_is_measured(target) -> None:
    cost = measure.measure_cost(target)
    assert 1e-5 < cost.drafting < 1


def test_the_engine_times_its_steps(target) -> None:
    told: list[tuple[int, int]] = []
    drafts: list[float] = []

    class Listener:
        def add(
            self, *, batch_size: int, num_rows: int, context: int, seconds: float, drafting: float
        ) -> None:
            assert 0 <= drafting < seconds
            drafts.append(drafting)
            assert 30 * batch_size <= context < (30 + 20) * batch_size
            told.append((batch_size, num_rows))

    engine = engine_of(target, max_batch_size=2)
    engine.live_costs = Listener()  # type: ignore[assignment]
    results = run(engine, [request(str(i), range(i, i + 30), max_tokens=20) for i in range(2)])
    rows = sum(r.stats.num_steps + r.stats.num_draft_tokens for r in results.values())
    assert sum(num_rows for _, num_rows in told) == rows
    assert {size for size, _ in told} <= {1, 2}
    assert sum(d > 0 for d in drafts) >= len(drafts) - 2, "only the last token takes no draft"
    assert sum(size for size, _ in told) == sum(r.stats.num_steps for r in results.values())
