"""`valuspec replay` and `valuspec cost`, as they are called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.cli import main
from jobs import prediction
from jobs.report import Report
from tests.support.answer_logs import write_log
from tests.support.trajectories import COST, markov_answers
from valuspec.thresholds import STARTING_SET

ANSWERS = markov_answers(60, 3, 30)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch) -> None:
    """The figures have tests of their own."""
    monkeypatch.setattr(Report, "to_html", lambda report: report.verdict)


@pytest.fixture
def answers_file(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    lines = [
        json.dumps({"prompt_ids": t.prompt_ids.tolist(), "answer_ids": t.output_ids.tolist()})
        for t in ANSWERS
    ]
    path.write_text("\n".join(lines))
    return path


def facts(out: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((out / "report.json").read_text())["facts"]
    return found


def test_a_prediction_from_token_ids(answers_file: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "gain"
    assert main(["replay", str(answers_file), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in ("unfiltered tree", "longest match", "most frequent", "filtered", "oracle filter"):
        assert name in printed
    assert "the speed of plain decoding" in printed
    assert str(out / "report.html") in printed
    assert facts(out)["calibrated with"] == 12
    assert facts(out)["verify cost"] == "SmolLM2-135M on two CPU cores"
    evaluation = json.loads((out / "report.json").read_text())["evaluation"]
    assert [b["max_batch_size"] for b in evaluation["buckets"]] == [1, 2, 4, 8]


def test_a_log_brings_its_costs_along(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    write_log(tmp_path / "log", ANSWERS)
    out = tmp_path / "gain"
    assert main(["replay", str(tmp_path / "log"), "--out", str(out), "--trees", "0"]) == 0
    assert facts(out)["verify cost"] == "the log's newest file"


def test_costs_and_thresholds_of_ones_own(answers_file: Path, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    flat = {"rows": [1, 64], "seconds": [0.02, 0.0201]}
    cost.write_text(json.dumps({"costs": {"1": flat}}))
    out = tmp_path / "gain"
    arguments = ["--cost", str(cost), "--thresholds", str(STARTING_SET), "--trees", "0"]
    assert main(["replay", str(answers_file), "--out", str(out), *arguments]) == 0
    modes = json.loads((out / "report.json").read_text())["evaluation"]["modes"]
    speedup = {m["name"]: m["speedup"] for m in modes}
    # Where more rows cost nothing, nothing is worth filtering.
    assert speedup["filtered"] == pytest.approx(speedup["unfiltered"], rel=0.02)


def test_few_answers_are_replayed_with_the_thresholds_at_hand(
    answers_file: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(answers_file.read_text().splitlines()[:20]))
    out = tmp_path / "gain"
    assert main(["replay", str(few), "--out", str(out), "--trees", "0"]) == 0
    assert facts(out)["calibrated with"] == 0
    assert facts(out)["thresholds"] == facts(out)["compared with"]


def test_what_cannot_be_replayed_is_said(answers_file: Path, tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "say", "answer": "some thing"}\n')
    assert main(["replay", str(text)]) == 3
    out = capsys.readouterr().out
    assert "Not enough data: 0 usable answers" in out
    assert "left out: 1 x text, and no tokenizer given" in out
    assert main(["replay", str(tmp_path / "nothing.jsonl")]) == 2
    assert main(["replay", str(answers_file), str(tmp_path)]) == 2
    assert "give one kind" in capsys.readouterr().err
    assert main(["replay", str(answers_file), "--cost", str(text)]) == 2
    assert "holds no cost staircases" in capsys.readouterr().err


def test_text_goes_through_the_tokenizer_asked_for(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def load_tokenizer(model: str) -> SimpleNamespace:
        asked.append(model)
        return SimpleNamespace(
            eos_token_id=0,
            encode=lambda text, add_special_tokens=True: [len(w) for w in text.split()],
        )

    monkeypatch.setattr("valuspec.engine.weights.load_tokenizer", load_tokenizer)
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "say", "answer": "some thing else"}\n')
    answers = prediction.read_answers([path], "my-model")
    assert asked == ["my-model"]
    assert answers.trajectories[0].output_ids.tolist() == [4, 5, 4]


def test_token_ids_need_neither_torch_nor_a_tokenizer(answers_file: Path, tmp_path: Path) -> None:
    """In a process of its own: this one has loaded everything."""
    code = (
        "import sys; from deployments.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'ray', 'redis'} & set(sys.modules);"
        "sys.exit(code or ', '.join(heavy) or 0)"
    )
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(answers_file.read_text().splitlines()[:10]))
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", str(few), "--out", str(tmp_path), "--trees", "0"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_costs_are_measured_and_written(tmp_path: Path, monkeypatch, capsys) -> None:
    target = SimpleNamespace(model_fingerprint="model", exact_mode="rows")
    monkeypatch.setattr("valuspec.engine.target.Target.load", lambda *_, **options: target)
    measured = []

    def measure_cost(target: object, *, batch_size: int) -> object:
        measured.append(batch_size)
        return COST

    monkeypatch.setattr("valuspec.engine.measure.measure_cost", measure_cost)
    out = tmp_path / "cost.json"
    assert main(["cost", "--batch-sizes", "4", "1", "--out", str(out)]) == 0
    assert measured == [1, 4]
    assert prediction.load_costs(out) == {1: COST, 4: COST}
    assert json.loads(out.read_text())["model_fingerprint"] == "model"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rows", "per", "request", "batch", "1", "batch", "4"]
    assert lines[1].split() == ["1", "20.0", "ms", "20.0", "ms"]
    assert main(["cost", "--batch-sizes", "0"]) == 2
