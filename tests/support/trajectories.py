"""Made-up greedy answers to replay, and a draft store stocked with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from valuspec.cost import CONTEXT, CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.replay import Trajectory

COST = CostStaircase((1, 8, 64), (0.02, 0.025, 0.08))
SLOPED = replace(COST, per_token=2e-5, per_key=1e-5, drafting=7e-4)
"""Of a machine on which long contexts cost."""


def markov_answers(count: int, seed: int, length: int = 60) -> list[Trajectory]:
    """Answers of a source that repeats itself: each token has two successors, one likely."""
    rng = np.random.default_rng(seed)
    likely, rare = np.random.default_rng(99).integers(1, 40, (2, 40))
    made = []
    for _ in range(count):
        tokens = [int(rng.integers(1, 40))]
        while len(tokens) < length + 6:
            tokens.append(int((likely if rng.random() < 0.85 else rare)[tokens[-1]]))
        prompt, output = np.array(tokens[:6], np.int32), np.array(tokens[6:], np.int32)
        made.append(Trajectory(prompt, output, max_tokens=length))
    return made


def behind_long_prompts(answers: list[Trajectory]) -> list[Trajectory]:
    """The same answers to prompts that end around CONTEXT tokens and far beyond."""
    return [
        replace(a, prompt_ids=np.r_[np.full(CONTEXT - 60 + 90 * i, 77, np.int32), a.prompt_ids])
        for i, a in enumerate(answers)
    ]


def stocked(answers: list[Trajectory]) -> Drafter:
    drafter = Drafter()
    for answer in answers:
        drafter.remember(answer.namespace, answer.prompt_ids, answer.output_ids)
    return drafter
