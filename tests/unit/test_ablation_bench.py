"""bench.ablation: its shipped row is the product, and its transfer table knows no future."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import ablation
from bench.variants import Answer, gather, learn_table
from tests.support.trajectories import COST, markov_answers, stocked
from valuspec.calibration import calibrate
from valuspec.replay import Trajectory, filtered, replay


def top_ids(trajectory: Trajectory) -> list[list[int]]:
    return [[int(token), 50 + place] for place, token in enumerate(trajectory.output_ids)]


def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    splits = {"history": 20, "calibration": 12, "test": 8}
    for seed, (split, count) in enumerate(splits.items()):
        lines = [
            json.dumps(
                {
                    "prompt_ids": t.prompt_ids.tolist(),
                    "output_ids": t.output_ids.tolist(),
                    "top_ids": top_ids(t),
                }
            )
            for t in markov_answers(count, seed)
        ]
        (tmp_path / f"markov.{split}.jsonl").write_text("\n".join(lines))
    cost, out = tmp_path / "cost.json", tmp_path / "out.json"
    cost.write_text(json.dumps(COST.to_json()))
    arguments = ["--data", str(tmp_path), "--workloads", "markov", "--cost", str(cost),
                 "--max-tokens", "60", "--trees", "0", "--out", str(out)]  # fmt: skip
    assert ablation.main(arguments) == 0
    rows = json.loads(out.read_text())["workloads"]["markov"]
    assert set(rows) >= {*ablation.VARIANTS, *ablation.TOP_K_VARIANTS, ablation.GROWN, "oracle"}
    speedups = {name: row["speedup"] for name, row in rows.items()}
    assert max(speedups[name] for name in ablation.VARIANTS) < speedups["oracle"]
    assert speedups["+ match length (shipped)"] > 1.1 * speedups["unfiltered"]
    geometric_mean = json.loads(capsys.readouterr().out.splitlines()[-1])["geometric_mean"]
    assert geometric_mean == pytest.approx(speedups)

    drafter, test = stocked(markov_answers(20, 0)), markov_answers(8, 2)
    made = calibrate(
        markov_answers(12, 1), drafter, {1: COST}, model_fingerprint="m", provenance={}
    )
    product = replay(test, drafter, filtered(made), COST).tok_s * COST.seconds[0]
    assert speedups["+ match length (shipped)"] == pytest.approx(product, rel=0.02)


@pytest.mark.parametrize("grow", [False, True])
def test_the_table_does_not_see_the_row_of_the_pending_token(grow: bool) -> None:
    """Rows the target computes later change nothing about what is offered now, nor its ranks."""
    history = [Answer(t, top_ids=top_ids(t)) for t in markov_answers(10, 0)]
    drafter = stocked([a.trajectory for a in history])
    one = markov_answers(1, 5)[0]
    rows = top_ids(one)
    known = 30
    changed = [*rows[:known], *([39, 38] for _ in rows[known:])]
    table = learn_table(history)
    nodes = [
        gather([Answer(one, top_ids=ids)], drafter, dict(table), grow=grow)
        for ids in (rows, changed)
    ]
    end = int(nodes[0].first_node[known])  # position p knows the rows 0 to p
    for name in ("last_rank", "table_rank"):
        first, second = (n.features[name] for n in nodes)
        assert first[:end].tolist() == second[:end].tolist()
        assert first[end:].tolist() != second[end : len(first)].tolist()
    assert nodes[0].parents[:end].tolist() == nodes[1].parents[:end].tolist()
