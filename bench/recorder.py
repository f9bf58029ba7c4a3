"""Runs an engine and keeps the logits that each output token was chosen from, as hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine.engine import Engine
from valuspec.engine.kv_cache import KvCache
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, StepOutput
from valuspec.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """One sequence's part of a forward: its rows, and the logits of all or of the last one."""

    rows: SequenceRows
    logits: torch.Tensor

    @property
    def every_row(self) -> bool:
        return len(self.logits) == len(self.rows)

    def continues(self, context: Sequence[int], output: Sequence[int]) -> bool:
        """Whether these rows may be those of a request with this context."""
        rows = self.rows
        if not output:  # the end of the prompt
            return list(rows.token_ids) == list(context[rows.start :])
        return rows.start == len(context) - 1 and int(rows.token_ids[0]) == context[-1]


class RecordingTarget:
    """A target that remembers what the current step computed; otherwise the one it wraps."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.verified: list[Verified] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(
        self,
        members: list[SequenceRows],
        cache: KvCache,
        logit_rows: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        logits = self._target.forward(members, cache, logit_rows)
        count = sum(map(len, members))
        wanted = np.arange(count) if logit_rows is None else logit_rows
        first = 0
        for rows in members:
            mine = (first <= wanted) & (wanted < first + len(rows))
            self.verified.append(Verified(rows, logits[torch.from_numpy(mine)]))
            first += len(rows)
        return logits


@dataclass(slots=True)
class Output:
    """What one request produced.

    digests: per output token, a hash of the logits it was chosen from
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    digests: list[bytes] = field(default_factory=list)


class Recorder:
    """Runs an engine step by step and attributes each output token to its row of logits."""

    def __init__(self, engine: Engine, target: RecordingTarget) -> None:
        self.engine = engine
        self.target = target
        self.outputs: dict[str, Output] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}

    def add(self, request: GenerationRequest, trees: Sequence[DraftTree] = ()) -> None:
        self.engine.add(request)
        self.engine.attach_retrieved(request.request_id, list(trees))
        self.outputs[request.request_id] = Output()
        self._prompts[request.request_id] = request.prompt_ids

    def step(self) -> list[StepOutput]:
        self.target.verified.clear()
        steps = self.engine.step()
        unclaimed = list(self.target.verified)
        for step in steps:
            self._record(step, unclaimed)
        return steps

    def _record(self, step: StepOutput, unclaimed: list[Verified]) -> None:
        output = self.outputs[step.request_id]
        context = [*self._prompts[step.request_id], *output.token_ids]
        # Requests report in the order of their rows, so the first match is the right one.
        verified = next((v for v in unclaimed if v.continues(context, output.token_ids)), None)
        if verified is None:
            raise RuntimeError(f"no rows of the last step belong to request {step.request_id}")
        unclaimed.remove(verified)
        rows, logits = verified.rows, verified.logits
        parents, tokens = rows.parents.tolist(), rows.token_ids.tolist()
        reached = [0 if verified.every_row else len(rows) - 1]
        for token in step.token_ids:
            if not reached:
                raise RuntimeError(f"request {step.request_id}: a token no verified row leads to")
            row = reached[-1] if verified.every_row else 0
            output.digests.append(_digest(logits[row]))
            # Several, where a tree holds the same token twice under one parent.
            reached = [r for r, p in enumerate(parents) if p in reached and tokens[r] == token]
        output.token_ids += step.token_ids
        output.text += step.text
        output.finish_reason = step.finish_reason


def _digest(logits: torch.Tensor) -> bytes:
    raw = logits.contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
