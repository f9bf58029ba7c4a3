"""What thresholds are worth on held-out answers, and the report that shows it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jobs import figures
from jobs import report as report_module
from jobs.evaluation import CURVE_TAUS, evaluate
from jobs.findings import Evaluation
from jobs.history import Answers, Split
from jobs.learning import NotEnoughDataError, digest, learn
from jobs.report import Report, write_whole
from jobs.workers import InProcess
from tests.support.trajectories import COST, markov_answers
from valuspec.cost import CostStaircase
from valuspec.thresholds import ThresholdSet

ANSWERS = [replace(t, namespace="ab"[i % 2]) for i, t in enumerate(markov_answers(60, 3, 30))]
SPLIT = Split.of(len(ANSWERS))
COSTS = {1: COST, 4: CostStaircase((1, 64), (0.02, 0.2))}


def made_from(trajectories: list, split: Split = SPLIT) -> ThresholdSet:
    answers = Answers(trajectories, model_fingerprint="model")
    return learn(answers, split, COSTS, num_trees=4, made_by="test")


@pytest.fixture(scope="module")
def thresholds() -> ThresholdSet:
    return made_from(ANSWERS)


@pytest.fixture(scope="module")
def evaluation(thresholds: ThresholdSet) -> Evaluation:
    previous = replace(ThresholdSet.starting("model"), local_costs=COSTS)
    return evaluate(
        ANSWERS,
        SPLIT,
        thresholds,
        previous,
        InProcess(),
        costs=COSTS,
        batch_shares={1: 30, 2: 10, 9: 60},
        num_trees=4,
    )


def test_the_same_answers_make_the_same_set_and_others_another(thresholds) -> None:
    assert made_from(ANSWERS).version == thresholds.version
    assert thresholds.model_fingerprint == "model"
    assert [b.max_batch_size for b in thresholds.buckets] == [1, 4]
    assert made_from([*ANSWERS[1:], ANSWERS[0]]).version != thresholds.version


def test_nothing_held_out_enters_the_set(thresholds) -> None:
    changed = [
        *ANSWERS[: SPLIT.evaluation.start],
        *markov_answers(len(SPLIT.evaluation), 77, 30),
    ]
    assert made_from(changed).version == thresholds.version


def test_too_few_answers_make_no_set() -> None:
    few = ANSWERS[:49]
    with pytest.raises(NotEnoughDataError, match="49 usable answers; at least 50"):
        made_from(few, Split.of(len(few)))


def test_the_digest_tells_answers_apart() -> None:
    one = replace(ANSWERS[0], prompt_ids=ANSWERS[0].prompt_ids[:-1])
    tenant = replace(ANSWERS[0], namespace="other")
    assert len({digest(ANSWERS[:1]), digest([one]), digest([tenant]), digest(ANSWERS[:2])}) == 4


def test_ways_of_choosing_are_in_the_order_they_must_be(evaluation) -> None:
    speedup = {m.name: m.speedup for m in evaluation.modes}
    assert speedup["oracle"] == max(speedup.values())
    assert speedup["filtered"] > speedup["unfiltered"]
    assert evaluation.speedup("filtered") == speedup["filtered"] > 1.5
    assert [m.name for m in evaluation.without_retrieval] == list(speedup)


def test_more_history_is_faster(evaluation) -> None:
    sizes = [size for size, _ in evaluation.history_curve]
    assert sizes == [0, 10, 30, SPLIT.evaluation.start]
    cold, warm = evaluation.history_curve[0][1], evaluation.history_curve[-1][1]
    assert warm["filtered"] > cold["filtered"]


def test_the_tau_curve_holds_the_chosen_one_and_ends_with_plain_decoding(evaluation) -> None:
    curve = dict(evaluation.tau_curve)
    assert set(CURVE_TAUS) <= set(curve)
    assert curve[evaluation.buckets[0].tau] == evaluation.speedup("filtered")
    assert curve[1.0] == pytest.approx(1.0, abs=0.05)


def test_traffic_is_compared_in_its_batch_mix(evaluation) -> None:
    one, four = evaluation.buckets
    assert (one.share, four.share) == (0.3, 0.7)  # the last bucket serves larger batches too
    compared = evaluation.comparison
    assert min(one.speedup, four.speedup) < compared.speedup < max(one.speedup, four.speedup)
    assert compared.gain == pytest.approx(compared.speedup / compared.previous_speedup - 1)
    assert compared.gain_low < compared.gain < compared.gain_high


def test_a_set_has_nothing_over_itself(thresholds) -> None:
    same = evaluate(
        ANSWERS,
        SPLIT,
        thresholds,
        thresholds,
        InProcess(),
        costs={1: COST},
        batch_shares={},
        num_trees=0,
    ).comparison
    assert (same.gain, same.gain_low, same.gain_high) == (0.0, 0.0, 0.0)


def test_groups_of_nodes_add_up(evaluation) -> None:
    by_depth, by_source = evaluation.by_depth, evaluation.by_source
    for field in ("offered", "kept", "accepted"):
        totals = [sum(getattr(g, field) for g in groups) for groups in (by_depth, by_source)]
        assert totals[0] == totals[1] > 0
    assert sum(g.offered for g in by_depth) == evaluation.reliability.num_nodes
    assert by_depth[0].name == "1"
    assert {"own", "retrieved", "shared"} >= {n for g in by_source for n in g.name.split(" + ")}


def test_every_tenant_is_shown(evaluation) -> None:
    assert sorted(name for name, *_ in evaluation.tenants) == ["a", "b"]
    assert sum(answers for _, answers, *_ in evaluation.tenants) == len(SPLIT.evaluation)


# -- the report -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(evaluation: Evaluation) -> Report:
    return Report(
        title="Title <b>",
        outcome="predicted",
        verdict="Faster & faster",
        facts={"files": "<script>alert(1)</script>"},
        skipped=Counter({"not JSON": 3}),
        evaluation=evaluation,
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_nothing_but_itself_and_runs_nothing(report: Report) -> None:
    page = report.to_html()
    parser = Tags()
    parser.feed(page)
    names = [tag for tag, _ in parser.tags]
    assert names.count("svg") == 9
    assert not {"script", "link", "img", "iframe", "b>"} & set(names)
    for _, attributes in parser.tags:
        assert not [
            v for k, v in attributes.items() if k in ("src", "srcset") or k.startswith("on")
        ]
        assert (attributes.get("xlink:href") or "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import", page)
    assert "Faster &amp; faster" in page


def test_equal_findings_give_equal_figures(evaluation: Evaluation) -> None:
    assert figures.costs(evaluation) == figures.costs(evaluation)


def test_the_json_has_everything_and_no_nan(report: Report, evaluation: Evaluation) -> None:
    quality = replace(evaluation.reliability, auc=float("nan"))
    text = replace(report, evaluation=replace(evaluation, reliability=quality)).to_json()
    content = json.loads(text, parse_constant=pytest.fail)
    assert content["outcome"] == "predicted"
    assert content["skipped"] == {"not JSON": 3}
    assert content["evaluation"]["reliability"]["auc"] is None
    assert content["evaluation"]["buckets"][0]["cost"]["rows"] == list(COST.rows)
    assert content["evaluation"]["comparison"]["gain"] == evaluation.comparison.gain


def test_a_report_without_findings_says_why(tmp_path: Path) -> None:
    report = Report("Recalibration", "not enough data", "Nothing published: 3 answers.", {})
    report.write(tmp_path / "new" / "folder")
    assert "3 answers" in (tmp_path / "new" / "folder" / "report.html").read_text()
    assert (
        json.loads((tmp_path / "new" / "folder" / "report.json").read_text())["evaluation"] is None
    )


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "report.json"
    write_whole(path, "old")

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_module.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
