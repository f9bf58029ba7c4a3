"""Requests as token ids, and the answers that earlier ones got."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bench import common
from valuspec.engine.target import Target

CALIBRATION = 60
"""Calibration requests used."""


@dataclass(frozen=True, slots=True)
class Workload:
    """earlier, calibration: [prompt, output] of finished requests, the target's own answers"""

    name: str
    prompts: list[list[int]]
    categories: list[str]
    earlier: list[list[list[int]]]
    calibration: list[list[list[int]]]


def read(
    target: Target, data: Path, name: str, *, history: int, limit: int | None, max_tokens: int
) -> Workload:
    """A workload of a folder of requests. Answers are made once and kept in the user's cache."""

    def answered(split: str, most: int) -> list[list[list[int]]]:
        prompts = common.load_prompts(data / f"{name}.{split}.jsonl", target, most)
        return [
            [t.prompt_ids.tolist(), t.output_ids.tolist()]
            for t in common.trajectories(target, prompts, max_tokens)
        ]

    test = data / f"{name}.test.jsonl"
    prompts = common.load_prompts(test, target, limit)
    records = [json.loads(line) for line in test.read_text(encoding="utf-8").splitlines()]
    return Workload(
        name,
        [list(p.token_ids) for p in prompts],
        [str(r.get("category", "")) for r in records[: len(prompts)]],
        answered("history", history),
        answered("calibration", min(CALIBRATION, history)),
    )
