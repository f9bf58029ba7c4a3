"""What an evaluation finds, as plain values: a report is made of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobs.simulation import Replayed
from valuspec.calibration import Reliability
from valuspec.cost import CostStaircase


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of choosing nodes, for a batch of one."""

    name: str
    speedup: float
    mean_acceptance_length: float
    nodes_per_step: float
    offered_per_step: float

    @classmethod
    def of(
        cls, name: str, replayed: Replayed, cost: CostStaircase, weights: NDArray[np.float64]
    ) -> Mode:
        return cls(
            name,
            replayed.speedup(cost, weights),
            replayed.mean_acceptance_length,
            replayed.nodes_per_step,
            replayed.offered_per_step,
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """One batch-size bucket."""

    max_batch_size: int
    share: float
    """Of the traffic's steps."""
    tau: float
    plain_tok_s: float
    """Tokens per second of one request."""
    speedup: float
    previous_speedup: float
    cost: CostStaircase


@dataclass(frozen=True, slots=True)
class Group:
    """Candidate nodes that have something in common: how many were kept, how many accepted."""

    name: str
    offered: int
    kept: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """New thresholds against those in use, on the held-out answers, in the traffic's batch mix."""

    speedup: float
    previous_speedup: float
    gain: float
    """Tokens per second, new over previous, minus one."""
    gain_low: float
    """Lower end of the gain's 90 % interval, resampling requests."""
    gain_high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything measured on the held-out answers."""

    num_tokens: int
    modes: list[Mode]
    without_retrieval: list[Mode]
    history_curve: list[tuple[int, dict[str, float]]]
    """(answers in the stores, speedup by mode)."""
    tau_curve: list[tuple[float, float]]
    """(tau, speedup) for a batch of one."""
    buckets: list[Bucket]
    comparison: Comparison
    tenants: list[tuple[str, int, float, float]]
    """(namespace, answers, weight of each, speedup)."""
    reliability: Reliability
    by_depth: list[Group]
    by_source: list[Group]

    def speedup(self, mode: str) -> float:
        return next(m.speedup for m in self.modes if m.name == mode)
