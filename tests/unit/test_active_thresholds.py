import json
import logging

import pytest

from deployments.thresholds import ActiveThresholds
from valuspec.thresholds import ThresholdSet

MODEL = "some-model"


@pytest.fixture
def active() -> ActiveThresholds:
    return ActiveThresholds(MODEL)


def write_set(path, model=MODEL, note="other") -> ThresholdSet:
    """A set like the shipped one, with another version."""
    shipped = ThresholdSet.starting(model)
    changed = ThresholdSet(
        model_fingerprint=model,
        seen=shipped.seen,
        taken=shipped.taken,
        buckets=shipped.buckets,
        provenance={"note": note},
    )
    path.write_text(changed.to_json())
    return changed


def test_it_begins_with_the_shipped_set_and_returns_to_it(active, tmp_path) -> None:
    shipped = active.current.version
    changed = write_set(tmp_path / "set.json")
    assert active.apply({"threshold_file": str(tmp_path / "set.json")})
    assert active.current.version == changed.version != shipped
    assert active.apply({"threshold_file": None})
    assert active.current.version == shipped


def refused(active, caplog, config) -> str:
    before = active.current
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        assert not active.apply(config)
    assert active.current is before, "the last good set stays"
    return caplog.text


def test_bad_sets_are_refused_with_the_reason(active, tmp_path, caplog) -> None:
    path = tmp_path / "set.json"
    write_set(path)
    assert active.apply({"threshold_file": str(path)})
    good = json.loads(path.read_text())

    write_set(path, model="another-model")
    assert "another-model" in refused(active, caplog, {"threshold_file": str(path)})
    path.write_text("{not json")
    assert refused(active, caplog, {"threshold_file": str(path)})
    good["buckets"][0]["tau"] = float("nan")
    path.write_text(json.dumps(good))
    assert "NaN" in refused(active, caplog, {"threshold_file": str(path)})
    missing = {"threshold_file": str(tmp_path / "none.json")}
    assert "none.json" in refused(active, caplog, missing)


def test_a_pinned_version_must_match(active, tmp_path, caplog) -> None:
    path = str(tmp_path / "set.json")
    changed = write_set(tmp_path / "set.json")
    config = {"threshold_file": path, "threshold_version": "0" * 16}
    assert changed.version in refused(active, caplog, config)
    assert active.apply({"threshold_file": path, "threshold_version": changed.version})
    assert active.apply({"threshold_file": path, "threshold_version": "latest"})


def test_without_a_model_every_set_is_taken_but_used_for_its_model_only(tmp_path) -> None:
    active = ActiveThresholds(model_fingerprint=None)
    changed = write_set(tmp_path / "set.json", model="a")
    assert active.apply({"threshold_file": str(tmp_path / "set.json")})
    assert active.for_model("a").version == changed.version
    assert active.for_model("b").version == ThresholdSet.starting("b").version
