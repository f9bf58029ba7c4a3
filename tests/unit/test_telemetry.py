import pytest

from deployments import telemetry as module
from deployments.messages import ChoiceReport, RetrievalReport
from deployments.telemetry import COUNTERS, GAUGES, HISTOGRAMS, Telemetry
from valuspec.engine.types import RequestStats


def report() -> ChoiceReport:
    histogram = [2, 1, 0, 3] + [0] * 13
    stats = RequestStats(
        num_prompt_tokens=5,
        num_output_tokens=16,
        num_steps=6,
        num_draft_tokens=20,
        num_offered_nodes=50,
        num_accepted_tokens=10,
        acceptance_histogram=histogram,
        decode_s=0.3,
    )
    return ChoiceReport(stats=stats, retrieval=RetrievalReport(), time_to_first_token_s=0.1)


def test_a_finished_request_is_counted() -> None:
    telemetry = Telemetry()
    telemetry.finished(report(), "stop", 0.5)
    totals = telemetry.totals()
    assert totals["valuspec_spec_decode_num_drafts"] == 6
    assert totals["valuspec_spec_decode_num_accepted_tokens"] == 10
    per_position = [
        totals.get(f"valuspec_spec_decode_num_accepted_tokens_per_pos_{i}", 0) for i in range(4)
    ]
    assert per_position == [4, 3, 3, 0]
    assert sum(per_position) == totals["valuspec_spec_decode_num_accepted_tokens"]


def test_serving_goes_on_where_ray_metrics_do_not_work(monkeypatch) -> None:
    def broken(*_, **__):
        raise RuntimeError("no metrics here")

    monkeypatch.setattr(module.metrics, "Gauge", broken)
    telemetry = Telemetry()
    telemetry.finished(report(), "stop", 0.5)
    telemetry.gauge("valuspec_exact", 1)
    assert telemetry.totals()["valuspec_generation_tokens"] == 16


def test_names_are_prometheus_names_and_tags_are_few() -> None:
    for name, (text, tags) in (COUNTERS | GAUGES | HISTOGRAMS).items():
        assert name.startswith("valuspec_")
        assert ":" not in name
        assert not name.endswith("_total"), "Ray appends it"
        assert text.endswith(".")
        assert len(tags) <= 1
        assert not {"request_id", "tenant", "tree_id"} & set(tags)


def test_an_unknown_name_is_a_mistake_that_shows() -> None:
    telemetry = Telemetry()
    with pytest.raises(KeyError):
        telemetry.count("valuspec_typo")
