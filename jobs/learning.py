"""From answers to a threshold set, the same from the same answers wherever it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jobs.history import Answers, Split, capped, retrieve, vocab_size
from valuspec.calibration import calibrate
from valuspec.cost import CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.errors import ThresholdError, ValuSpecError
from valuspec.replay import Trajectory
from valuspec.thresholds import ThresholdSet

MIN_PART = 10
"""Fewest answers of the calibration and of the evaluation part."""


class NotEnoughDataError(ValuSpecError):
    """There is too little to learn from or to judge by; the message has the numbers."""


def learn(
    answers: Answers,
    split: Split,
    costs: Mapping[int, CostStaircase],
    *,
    num_trees: int,
    made_by: str,
) -> ThresholdSet:
    """Calibrate with the calibration part, drafting from the history before it.

    Nothing but the arguments enters the set, no clock and no host, so its version says whether
    two runs came to the same result. Raises NotEnoughDataError.
    """
    check_size(split)
    history = [answers.trajectories[i] for i in split.history]
    calibration = capped([answers.trajectories[i] for i in split.calibration])
    drafter = Drafter()
    for t in history:
        drafter.remember(t.namespace, t.prompt_ids, t.output_ids)
    if num_trees:
        trees = retrieve(history, calibration, vocab_size(history + calibration), num_trees)
        calibration = [replace(t, retrieved=r) for t, r in zip(calibration, trees, strict=True)]
    provenance = {
        "made_by": made_by,
        "num_history": len(history),
        "num_trajectories": len(calibration),
        "num_trees": num_trees,
        "answers": digest(history + calibration),
    }
    model = answers.model_fingerprint
    try:
        return calibrate(
            calibration, drafter, costs, model_fingerprint=model, provenance=provenance
        )
    except ThresholdError as error:
        raise NotEnoughDataError(str(error)) from error


def check_size(split: Split) -> None:
    """Raise NotEnoughDataError unless both parts hold enough answers."""
    if min(len(split.calibration), len(split.evaluation)) < MIN_PART:
        total = split.evaluation.stop
        raise NotEnoughDataError(f"{total} usable answers; at least {5 * MIN_PART} needed")


def digest(trajectories: Sequence[Trajectory]) -> str:
    """Hash of the answers in their order, 16 hex digits."""
    hashed = hashlib.sha256()
    for t in trajectories:
        hashed.update(t.namespace.encode() + b"\0")
        for token_ids in (t.prompt_ids, t.output_ids):
            hashed.update(len(token_ids).to_bytes(8, "little") + token_ids.astype("<i4").tobytes())
    return hashed.hexdigest()[:16]
