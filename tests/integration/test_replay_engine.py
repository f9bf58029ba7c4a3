"""Replay must reproduce the engine: the same steps, kept nodes and tokens, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.tiny_models import VOCAB, tiny_target
from tests.support.trajectories import SLOPED
from valuspec.cost import CONTEXT
from valuspec.drafting.drafter import Drafter
from valuspec.engine.engine import Engine
from valuspec.engine.proposal import keep_by_value
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, SamplingParams
from valuspec.evidence import CandidateTree
from valuspec.replay import Trajectory, filtered, steps
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

NAMESPACE = "tenant"
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def prompts(count: int) -> list[tuple[int, ...]]:
    """Prompts that share parts, so that answers resemble each other; long enough to cost."""
    rng = np.random.default_rng(0)
    parts = rng.integers(0, 256, (4, 8))
    long = rng.integers(0, 256, CONTEXT).tolist()
    return [(*long, *np.concatenate(parts[rng.integers(0, 4, 3)]).tolist()) for _ in range(count)]


@dataclass
class Recorded:
    """(nodes kept, tokens emitted) per step of one request."""

    kept: list[list[int]] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)


def run_engine(target: Target, thresholds: ThresholdSet, trees: list[DraftTree]) -> list[Recorded]:
    """Decode all prompts one after the other, each with `trees` retrieved."""
    recorded: list[Recorded] = []

    def recording_filter(
        candidates: Sequence[CandidateTree],
        thresholds: Sequence[ThresholdSet],
        batch_size: int,
        max_nodes: int,
    ) -> Sequence[NDArray[np.int32]]:
        parts = keep_by_value(candidates, thresholds, batch_size, max_nodes)
        recorded[-1].kept += [kept.tolist() for kept in parts]
        return parts

    engine = Engine(
        target,
        drafter=Drafter(),
        thresholds=thresholds,
        max_batch_size=1,
        node_filter=recording_filter,
    )
    for number, prompt in enumerate(prompts(12)):
        recorded.append(Recorded())
        engine.add(
            GenerationRequest(
                request_id=str(number),
                prompt_ids=prompt,
                params=SamplingParams(max_tokens=MAX_TOKENS),
                namespace=NAMESPACE,
            )
        )
        engine.attach_retrieved(str(number), trees)
        while engine.has_work:
            recorded[-1].tokens += [step.token_ids for step in engine.step()]
    return recorded


@pytest.mark.parametrize("retrieved", [False, True])
def test_replay_makes_the_steps_of_the_engine(target: Target, retrieved: bool) -> None:
    thresholds = ThresholdSet.starting(target.model_fingerprint)
    thresholds = replace(thresholds, local_costs={1: SLOPED})
    rng = np.random.default_rng(1)
    trees = [DraftTree.from_paths(rng.integers(0, VOCAB, (3, 9)).tolist())] if retrieved else []
    recorded = run_engine(target, thresholds, trees)
    drafter = Drafter()
    accepted = 0
    for prompt, request in zip(prompts(12), recorded, strict=True):
        output = np.array([t for tokens in request.tokens for t in tokens], np.int32)
        trajectory = Trajectory(
            np.array(prompt, np.int32), output, MAX_TOKENS, tuple(trees), NAMESPACE
        )
        kept = []
        tokens = [1]  # prefill yields one
        for step in steps(trajectory, drafter, filtered(thresholds)):
            kept.append(step.kept.tolist())
            tokens.append(step.num_tokens)
            accepted += step.num_accepted
        assert tokens == [len(emitted) for emitted in request.tokens]
        # Where one token was left, the engine did not draft.
        assert [k for k in kept if k] == [k for k in request.kept if k]
        drafter.remember(NAMESPACE, prompt, output.tolist())
    assert accepted > 50  # there was something to compare
