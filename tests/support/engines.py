"""Short ways to run an engine in tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.adversary import Adversary, ScriptedDrafter, keep_all
from valuspec.drafting.drafter import Drafter
from valuspec.engine.engine import Engine
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, RequestStats, SamplingParams, StepOutput
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree


@dataclass
class Result:
    """Everything one request gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stats: RequestStats | None = None

    def add(self, step: StepOutput) -> None:
        assert self.finish_reason is None, "output after the end"
        self.token_ids += step.token_ids
        self.text += step.text
        self.finish_reason, self.stats = step.finish_reason, step.stats

    @property
    def visible(self) -> tuple[list[int], str, str | None]:
        """What must not depend on speculation."""
        return self.token_ids, self.text, self.finish_reason

    @property
    def num_accepted(self) -> int:
        assert self.stats is not None
        return self.stats.num_accepted_tokens


def engine_of(target: Target, drafter: Drafter | None = None, **options: Any) -> Engine:
    """An engine that verifies every node it is offered."""
    return Engine(
        target,
        drafter=drafter if drafter is not None else Drafter(),
        thresholds=ThresholdSet.starting(target.model_fingerprint),
        **{"node_filter": keep_all} | options,
    )


def scripted(
    target: Target,
    futures: dict[tuple[int, ...], Sequence[int]],
    *adversaries: Adversary,
    seed: int = 0,
) -> ScriptedDrafter:
    return ScriptedDrafter(adversaries, target.vocab_size, futures, seed)


def request(name: str, prompt: Sequence[int], **params: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_ids=tuple(prompt), params=SamplingParams(**params)
    )


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, Result]:
    """Add all requests and step until nothing is left."""
    results = {}
    for r in requests:
        engine.add(r)
        results[r.request_id] = Result()
    while engine.has_work:
        for step in engine.step():
            results[step.request_id].add(step)
    return results


def plain(target: Target, r: GenerationRequest) -> Result:
    """The request alone, without speculation."""
    alone = replace(r, params=replace(r.params, speculative=False))
    return run(engine_of(target, max_batch_size=1), [alone])[r.request_id]


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def fixed(tree: DraftTree) -> Adversary:
    """An adversary that always proposes the same tree, cut to the allowed depth."""

    def draw(rng: Any, future: Sequence[int], vocab: int, nodes: int, depth: int) -> DraftTree:
        kept = np.flatnonzero(tree.depths() <= depth)[:nodes]
        return tree.select(kept)

    return draw
