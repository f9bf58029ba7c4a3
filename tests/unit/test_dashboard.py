"""Every query of the dashboard asks for a series that a replica exports, by tags it has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import deployments
from deployments.telemetry import COUNTERS, GAUGES, HISTOGRAMS

DASHBOARD = json.loads(
    (Path(deployments.__file__).parent / "grafana" / "valuspec.json").read_text()
)
QUERIES = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
#: Added by Ray Serve to every series.
SERVE_TAGS = {"deployment", "replica", "application"}


def exported() -> dict[str, set[str]]:
    """Name of each series in Prometheus -> its tags."""
    series = {f"ray_{name}_total": set(tags) for name, (_, tags) in COUNTERS.items()}
    series |= {f"ray_{name}": set(tags) for name, (_, tags) in GAUGES.items()}
    series |= {f"ray_{n}_bucket": {*tags, "le"} for n, (_, tags) in HISTOGRAMS.items()}
    return series


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_series_and_tags_that_exist(query: str) -> None:
    series = exported()
    names = re.findall(r"ray_\w+", query)
    assert names
    assert set(names) <= set(series), "no replica exports this"
    for tags in re.findall(r"by \(([^)]*)\)", query):
        known = set.union(*(series[name] for name in names)) | SERVE_TAGS
        assert {tag.strip() for tag in tags.split(",")} <= known
    for name in names:
        if name.endswith(("_total", "_bucket")):
            assert re.search(rf"(rate|increase)\({name}\[", query), "a counter needs a rate"


def test_legends_use_tags_that_the_query_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for tag in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                kept = re.search(rf"by \([^)]*\b{tag}\b", target["expr"])
                whole = "(" not in target["expr"] and tag in SERVE_TAGS
                assert kept or whole, (panel["title"], tag)


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        mine = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not mine & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= mine
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_counter_of_speculation_is_shown() -> None:
    shown = set(re.findall(r"ray_(\w+?)(?:_total|_bucket)?[\[\s)=]", " ".join(QUERIES) + " "))
    assert {name for name in COUNTERS if "spec_decode" in name or "tree" in name} - shown <= {
        "valuspec_spec_decode_num_draft_tokens"  # the same as tree_nodes_kept
    }
