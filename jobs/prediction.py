"""`valuspec replay`: what draft trees would have brought for answers already given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobs.evaluation import evaluate
from jobs.figures import NAMES
from jobs.findings import Evaluation
from jobs.history import Answers, Split
from jobs.learning import NotEnoughDataError, learn
from jobs.report import Report
from jobs.workers import say, workers
from valuspec.cost import CostStaircase
from valuspec.errors import ThresholdError
from valuspec.thresholds import ThresholdSet

OK, NOT_ENOUGH_DATA = 0, 3


def predict(
    files: Sequence[Path],
    *,
    tokenizer: str | None,
    cost_file: Path | None,
    threshold_file: Path | None,
    num_trees: int,
    num_workers: int | None,
    out: Path,
) -> int:
    """Print a table, write the report to `out`, return the exit code.

    Raises ThresholdError, ModelError or OSError for an input that cannot be used.
    """
    say(f"reading {', '.join(map(str, files))}")
    answers = read_answers(files, tokenizer)
    split = Split.of(len(answers.trajectories))
    if not split.evaluation or not split.calibration:
        print(f"Not enough data: {len(answers.trajectories)} usable answers.")
        _print_skipped(answers)
        return NOT_ENOUGH_DATA
    costs, cost_source = choose_costs(cost_file, answers)
    before = (
        ThresholdSet.load(threshold_file)
        if threshold_file
        else ThresholdSet.starting(answers.model_fingerprint)
    )
    before = replace(before, local_costs=costs)
    with workers(num_workers) as pool:
        try:
            say(f"calibrating with {len(split.calibration)} answers")
            made = learn(answers, split, costs, num_trees=num_trees, made_by="valuspec replay")
        except NotEnoughDataError as error:
            say(f"not calibrating: {error}")
            made = before
        say(f"replaying {len(split.evaluation)} held-out answers")
        evaluation = evaluate(
            answers.trajectories,
            split,
            made,
            before,
            pool,
            costs=costs,
            batch_shares=answers.steps_by_batch,
            num_trees=num_trees,
        )
    report = Report(
        title="What would I gain?",
        outcome="predicted",
        verdict=_verdict(evaluation),
        facts={
            "files": ", ".join(map(str, files)),
            "answers": len(answers.trajectories),
            "in the stores beforehand": len(split.history),
            "calibrated with": 0 if made is before else len(split.calibration),
            "held out": f"{len(split.evaluation)} ({evaluation.num_tokens} tokens)",
            "verify cost": cost_source,
            "measured when given": answers.measured,
            "draft trees retrieved": num_trees,
            "thresholds": made.version,
            "compared with": before.version,
        },
        skipped=answers.skipped,
        evaluation=evaluation,
    )
    report.write(out)
    _print_modes(evaluation)
    _print_skipped(answers)
    print(f"\n{report.verdict}\nReport: {out / 'report.html'}")
    return OK


def read_answers(files: Sequence[Path], tokenizer: str | None) -> Answers:
    """Logs or JSON lines, by the files' names. Raises ModelError or OSError."""
    logs = [file for file in files if file.is_dir() or file.suffix == ".parquet"]
    if len(logs) == len(files):
        return Answers.from_log(files)
    if logs:
        raise ThresholdError(f"{logs[0]} is a trajectory log, other files are not: give one kind")
    if tokenizer is None:
        return Answers.from_transcripts(files)
    from valuspec.engine.weights import load_tokenizer  # brings torch with it

    return Answers.from_transcripts(files, load_tokenizer(tokenizer))


def choose_costs(cost_file: Path | None, answers: Answers) -> tuple[dict[int, CostStaircase], str]:
    """(cost staircases by largest batch size, where they come from)."""
    if cost_file:
        return load_costs(cost_file), str(cost_file)
    if answers.costs:
        return answers.costs, "the log's newest file"
    shipped = ThresholdSet.starting("")
    return {b.max_batch_size: b.cost for b in shipped.buckets}, "SmolLM2-135M on two CPU cores"


def load_costs(path: Path) -> dict[int, CostStaircase]:
    """Read what `valuspec cost` wrote; raises ThresholdError or OSError."""
    try:
        costs = json.loads(path.read_bytes())["costs"]
        return {int(size): CostStaircase.from_json(cost) for size, cost in costs.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ThresholdError(f"{path} holds no cost staircases: {error!r}") from error


def _verdict(evaluation: Evaluation) -> str:
    speedup = {m.name: m.speedup for m in evaluation.modes}
    if speedup["filtered"] < 1.02:
        return "Draft trees would bring next to nothing here: these answers say little twice."
    return (
        f"These answers would be decoded at {speedup['filtered']:.2f} times the speed of plain "
        f"decoding; by longest match at {speedup['chain']:.2f}, with the unfiltered tree at "
        f"{speedup['unfiltered']:.2f} times. Output tokens stay the same."
    )


def _print_modes(evaluation: Evaluation) -> None:
    print(f"\n{'batch of one':<22}{'speedup':>9}{'no retrieval':>14}{'tokens/step':>13}"
          f"{'nodes/step':>12}")  # fmt: skip
    for mode, alone in zip(evaluation.modes, evaluation.without_retrieval, strict=True):
        print(f"{NAMES[mode.name]:<22}{mode.speedup:>8.2f}x{alone.speedup:>13.2f}x"
              f"{mode.mean_acceptance_length:>13.2f}{mode.nodes_per_step:>12.1f}")  # fmt: skip
    print(f"\n{'earlier answers':<22}{'speedup':>9}")
    for size, speedup in evaluation.history_curve:
        print(f"{size:<22}{speedup['filtered']:>8.2f}x")
    print(f"\n{'batch up to':<22}{'speedup':>9}")
    for bucket in evaluation.buckets:
        print(f"{bucket.max_batch_size:<22}{bucket.speedup:>8.2f}x")


def _print_skipped(answers: Answers) -> None:
    for reason, count in answers.skipped.most_common():
        print(f"left out: {count} x {reason}")
