"""Earlier answers in the order they were given, and how they are divided.

    |  history: stocks the draft stores  |  calibration: rates, tau  |  evaluation: held out  |

The parts follow each other in time, so nothing is judged by what came after it, and no request is
in two parts. A prompt that comes again in a later part is traffic, not leakage.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from jobs.transcripts import Tokenizer, read_transcripts
from retrieval.faiss_index import FaissIndex
from retrieval.service import RetrievalService
from retrieval.store import InMemoryStore
from retrieval.trajectory_log import LoggedTrajectory, read_log
from valuspec.cost import CostStaircase
from valuspec.replay import Trajectory
from valuspec.tree import DraftTree

CALIBRATION_SHARE = 0.2
EVALUATION_SHARE = 0.2
MAX_ANSWERS = 20_000
"""The newest answers that are looked at; more would take long and change little."""
MAX_PART = 1000
"""Most answers of the calibration and of the evaluation part: beyond, estimates hardly change."""
MIN_TENANT_ANSWERS = 50
"""So many answers of a tenant always count, however few the others have."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy answers in the order they were given.

    skipped:           what was left out, by reason
    model_fingerprint: of the model that gave them; empty if nobody says
    costs:             verify cost where they were given, by largest batch size; empty if unknown
    steps_by_batch:    decode steps by batch size; empty if unknown
    measured:          how fast they were given, in words
    """

    trajectories: list[Trajectory]
    skipped: Counter[str] = field(default_factory=Counter)
    model_fingerprint: str = ""
    costs: dict[int, CostStaircase] = field(default_factory=dict)
    steps_by_batch: Counter[int] = field(default_factory=Counter)
    measured: str = "unknown"

    @classmethod
    def from_log(cls, paths: Iterable[Path], model_fingerprint: str | None = None) -> Answers:
        """Read trajectory logs, files and folders; None takes the model of the newest answer."""
        paths = list(paths)
        read = read_log(paths, model_fingerprint=model_fingerprint)
        if model_fingerprint is None and read.trajectories:
            newest = read.trajectories[-1].model_fingerprint
            if any(row.model_fingerprint != newest for row in read.trajectories):
                read = read_log(paths, model_fingerprint=newest)
            model_fingerprint = newest
        rows = read.trajectories[-MAX_ANSWERS:]
        steps: Counter[int] = Counter()
        for row in rows:
            steps.update(row.batch_size.tolist())
        return cls(
            [
                Trajectory(r.prompt_ids, r.output_ids, r.max_tokens, namespace=r.namespace)
                for r in rows
                if len(r.output_ids) > 1  # else there was nothing to draft
            ],
            read.skipped + Counter({"row.older": len(read.trajectories) - len(rows)}),
            model_fingerprint or "",
            read.costs,
            steps,
            _measured(rows),
        )

    @classmethod
    def from_transcripts(cls, paths: Sequence[Path], tokenizer: Tokenizer | None = None) -> Answers:
        """Read JSON lines of any server; see `jobs.transcripts`."""
        read = read_transcripts(paths, tokenizer)
        newest = read.trajectories[-MAX_ANSWERS:]
        older = Counter({"older": len(read.trajectories) - len(newest)})
        return cls(newest, read.skipped + older)


def _measured(rows: Sequence[LoggedTrajectory]) -> str:
    num_steps = sum(len(row.accepted) for row in rows)
    decode_s = sum(row.decode_s for row in rows)
    if not num_steps or not decode_s:
        return "unknown"
    num_tokens = sum(len(row.output_ids) - 1 for row in rows)
    kept = sum(int(row.kept.sum()) for row in rows)
    return (
        f"{num_tokens / decode_s:.1f} tokens per second a stream, "
        f"{num_tokens / num_steps:.2f} tokens and {kept / num_steps:.1f} nodes a step"
    )


@dataclass(frozen=True, slots=True)
class Split:
    """Consecutive ranges of indices into one list of trajectories."""

    history: range
    calibration: range
    evaluation: range

    @classmethod
    def of(cls, num_trajectories: int) -> Split:
        """The newest fifth is evaluated, the fifth before it calibrated with."""
        evaluated = min(MAX_PART, int(num_trajectories * EVALUATION_SHARE))
        calibrated = min(MAX_PART, int(num_trajectories * CALIBRATION_SHARE))
        second = num_trajectories - evaluated
        first = second - calibrated
        return cls(range(first), range(first, second), range(second, num_trajectories))


def tenant_weights(namespaces: Sequence[str]) -> NDArray[np.float64]:
    """Weight of each answer, float64 [n]: no tenant outweighs all others together."""
    counts = Counter(namespaces)
    limit = _most_per_tenant(counts)
    return np.array([min(1.0, limit / counts[name]) for name in namespaces])


def capped(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Leave out answers of a tenant that would outweigh all others, evenly over time."""
    counts = Counter(t.namespace for t in trajectories)
    limit = _most_per_tenant(counts)
    kept, turn = [], Counter[str]()
    for trajectory in trajectories:
        name = trajectory.namespace
        share = min(1.0, limit / counts[name])
        turn[name] += 1
        if int(turn[name] * share) > int((turn[name] - 1) * share):
            kept.append(trajectory)
    return kept


def _most_per_tenant(counts: Mapping[str, int]) -> float:
    """As many as all tenants but the largest have together, or the minimum."""
    if len(counts) < 2:
        return float("inf")
    *others, _ = sorted(counts.values())
    return max(MIN_TENANT_ANSWERS, sum(others))


class SimulatedRetrieval:
    """The retrieval of a replica, in this process: what a lookup would have found in its turn."""

    def __init__(self, *, vocab_size: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._service = RetrievalService(InMemoryStore(), FaissIndex, vocab_size=vocab_size)

    def add(self, trajectory: Trajectory) -> None:
        """Store a finished answer."""
        self._loop.run_until_complete(
            self._service.write_back(
                trajectory.namespace, trajectory.prompt_ids.tolist(), trajectory.output_ids.tolist()
            )
        )

    def lookup(self, trajectory: Trajectory, k: int) -> tuple[DraftTree, ...]:
        """Trees of the k most similar requests stored so far, most similar first."""
        found = self._loop.run_until_complete(
            self._service.lookup(
                trajectory.namespace, trajectory.prompt_ids.tolist(), k, deadline_s=60.0
            )
        )
        return tuple(found.trees)

    def __enter__(self) -> SimulatedRetrieval:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.run_until_complete(self._service.aclose())
        self._loop.close()


def retrieve(
    history: Iterable[Trajectory], queries: Iterable[Trajectory], vocab_size: int, k: int
) -> list[tuple[DraftTree, ...]]:
    """Draft trees of the k most similar answers of `history` for each query."""
    with SimulatedRetrieval(vocab_size=vocab_size) as retrieval:
        for trajectory in history:
            retrieval.add(trajectory)
        return [retrieval.lookup(query, k) for query in queries]


def vocab_size(trajectories: Iterable[Trajectory]) -> int:
    """One more than the greatest token id that occurs."""
    return 1 + max(
        (int(max(t.prompt_ids.max(), t.output_ids.max())) for t in trajectories), default=0
    )
