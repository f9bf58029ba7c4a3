"""Learn a threshold set from the target's own greedy trajectories. No training: counting.

1. Replay the calibration trajectories and label every edge that was put to the test.
2. Count by signature: transfer rates.
3. Per batch bucket, find the price of a second and the threshold tau that give the most tokens
   per second in exact replay.

Labels come from whole candidate trees, kept or not, so edges that the thresholds would never let
through are counted all the same.

The trajectories must not be in the draft sources they are replayed with: an answer that meets
itself in the store would call every match perfect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valuspec.cost import CostStaircase
from valuspec.drafted import Drafted
from valuspec.drafting.drafter import Drafter
from valuspec.errors import ThresholdError
from valuspec.replay import Trajectory
from valuspec.thresholds import BatchBucket, ThresholdSet

TAUS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12)
TAU_TOLERANCE = 0.001
"""Of thresholds this close to the fastest the highest is taken: it spares useless rows and prunes
retrieved trees before they travel."""
MIN_LABELS = 200


def calibrate(
    trajectories: Sequence[Trajectory],
    drafter: Drafter,
    costs: Mapping[int, CostStaircase],
    *,
    model_fingerprint: str,
    provenance: Mapping[str, Any],
    rounds: int = 3,
) -> ThresholdSet:
    """Make a threshold set; raises ThresholdError when there is too little to learn from.

    costs: cost staircase by largest batch size of its bucket.
    rounds: where a step begins depends on what the step before had accepted, hence on the
    thresholds; each round counts along the steps of the set before it.
    """
    return calibrate_drafted(
        Drafted(trajectories, drafter),
        costs,
        model_fingerprint=model_fingerprint,
        provenance=provenance,
        rounds=rounds,
    )


def calibrate_drafted(
    drafted: Drafted,
    costs: Mapping[int, CostStaircase],
    *,
    model_fingerprint: str,
    provenance: Mapping[str, Any],
    rounds: int = 3,
) -> ThresholdSet:
    """As `calibrate`, for trees that are drafted already."""
    seen, taken = drafted.transfers(drafted.walk(None))
    if seen.sum() < MIN_LABELS:
        raise ThresholdError(f"{seen.sum()} labelled edges; at least {MIN_LABELS} needed")
    buckets = tuple(
        BatchBucket(size, 0.0, 1.0 / cost.seconds[0], cost) for size, cost in sorted(costs.items())
    )
    made = ThresholdSet(
        model_fingerprint=model_fingerprint,
        seen=seen,
        taken=taken,
        buckets=buckets,
        provenance=dict(provenance),
    )
    for _ in range(rounds):
        made = replace(made, buckets=tuple(
            _price(made, index, drafted) for index in range(len(buckets))
        ))  # fmt: skip
        seen, taken = drafted.transfers(drafted.walk(made))
        made = replace(made, seen=seen, taken=taken)
    return replace(made, buckets=tuple(
        _best_tau(made, index, drafted) for index in range(len(buckets))
    ))  # fmt: skip


def _price(thresholds: ThresholdSet, index: int, drafted: Drafted) -> BatchBucket:
    """Fixed point of the price of a second: nodes pay at the rate that keeping them brings."""
    bucket = thresholds.buckets[index]
    return replace(bucket, stream_tok_s=_replayed(thresholds, bucket, drafted))


def _best_tau(thresholds: ThresholdSet, index: int, drafted: Drafted) -> BatchBucket:
    options = [replace(thresholds.buckets[index], tau=tau) for tau in TAUS]
    speeds = [_replayed(thresholds, option, drafted) for option in options]
    good = [
        o for o, s in zip(options, speeds, strict=True) if s >= (1 - TAU_TOLERANCE) * max(speeds)
    ]
    return good[-1]


def _replayed(thresholds: ThresholdSet, bucket: BatchBucket, drafted: Drafted) -> float:
    trial = replace(thresholds, buckets=(bucket,))
    return drafted.walk(trial).tok_s(bucket.cost)


@dataclass(frozen=True, slots=True)
class Reliability:
    """How well values foretell what the target accepts, over reached and unreached nodes alike."""

    num_nodes: int
    expected_calibration_error: float
    brier: float
    auc: float
    mean_value: tuple[float, ...]
    share_accepted: tuple[float, ...]
    bin_sizes: tuple[int, ...]


def reliability(
    trajectories: Sequence[Trajectory],
    drafter: Drafter,
    thresholds: ThresholdSet,
    *,
    num_bins: int = 10,
) -> Reliability:
    """Compare values with outcomes along the steps the thresholds lead to."""
    drafted = Drafted(trajectories, drafter)
    value, accepted = drafted.outcomes(drafted.walk(thresholds), thresholds)
    return score(value, accepted, num_bins=num_bins)


def score(
    value: NDArray[np.floating[Any]], outcome: NDArray[np.bool_], *, num_bins: int = 10
) -> Reliability:
    """Calibration error, Brier score and AUC of `value` [n] against `outcome` [n]."""
    bins = np.minimum((value * num_bins).astype(int), num_bins - 1)
    sizes = np.bincount(bins, minlength=num_bins)
    filled = np.maximum(sizes, 1)
    mean_value = np.bincount(bins, value, num_bins) / filled
    accepted = np.bincount(bins, outcome, num_bins) / filled
    return Reliability(
        num_nodes=len(value),
        expected_calibration_error=float(
            np.sum(sizes * np.abs(mean_value - accepted)) / max(1, len(value))
        ),
        brier=float(np.mean((value - outcome) ** 2)) if len(value) else 0.0,
        auc=_auc(value, outcome),
        mean_value=tuple(mean_value.tolist()),
        share_accepted=tuple(accepted.tolist()),
        bin_sizes=tuple(sizes.tolist()),
    )


def _auc(value: NDArray[np.floating[Any]], outcome: NDArray[np.bool_]) -> float:
    """Chance that an accepted node is valued above a rejected one; ties count half."""
    positives = int(outcome.sum())
    negatives = len(outcome) - positives
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(value, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    ranks = float(mean_rank[inverse][outcome].sum())
    return (ranks - positives * (positives + 1) / 2) / (positives * negatives)
