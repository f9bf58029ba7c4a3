"""A target and an engine with the real ones' interface and no model.

The "model" continues a prompt with that prompt's own bytes, over and over, so every test knows
the answer. A step is allowed only while `gate` is set, which lets tests hold a stream in the
middle without sleeping.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from valuspec.cost import LiveCosts
from valuspec.engine.types import FinishReason, GenerationRequest, RequestStats, StepOutput
from valuspec.errors import RequestError
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree


class FakeTarget:
    """One token per UTF-8 byte."""

    vocab_size = 256
    max_model_len = 128
    model_fingerprint = "fake-model"
    tokenizer_fingerprint = "fake-tokenizer"
    exact = True
    exact_mode = "rows"

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    output: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)


class FakeEngine:
    """Two tokens a step: one accepted draft token and the bonus token."""

    kv_tokens = 512

    def __init__(self, target: FakeTarget, max_batch_size: int = 2) -> None:
        self.target = target
        self.thresholds = ThresholdSet.starting(target.model_fingerprint)
        self.max_batch_size = max_batch_size
        self.live_costs = LiveCosts({})
        self.counters: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.hold_after_step: int | None = None
        """Clears the gate when so many steps have run."""
        self.fail_step: Exception | None = None
        """Raised by the next steps."""
        self.fail_requests: set[str] = set()
        """Prompts (as text) whose requests end with an error after one step."""
        self.attached: dict[str, list[DraftTree]] = {}
        self.cancelled: list[str] = []
        self.remembered: list[tuple[str, DraftTree]] = []
        self.num_steps = 0
        self._running: dict[str, _Running] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def num_running(self) -> int:
        return min(len(self._running), self.max_batch_size)

    @property
    def kv_usage(self) -> float:
        return 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._running) - self.num_running

    def validate(self, request: GenerationRequest) -> None:
        if any(token_id >= self.target.vocab_size for token_id in request.prompt_ids):
            raise RequestError("token ids beyond the vocabulary", param="prompt")
        wanted = len(request.prompt_ids) + request.params.max_tokens
        if wanted > self.target.max_model_len:
            raise RequestError(
                f"prompt and max_tokens need {wanted} tokens, "
                f"the context has {self.target.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def add(self, request: GenerationRequest) -> None:
        self._running[request.request_id] = _Running(request, list(request.resumed_ids))

    def attach_retrieved(self, request_id: str, trees: list[DraftTree]) -> None:
        self.attached[request_id] = trees

    def remember(self, trees: Iterable[tuple[str, DraftTree]]) -> None:
        self.remembered += trees

    def cancel(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def step(self) -> list[StepOutput]:
        self.gate.wait()
        self.num_steps += 1
        if self.num_steps == self.hold_after_step:
            self.gate.clear()
        if self.fail_step is not None:
            raise self.fail_step
        return [self._advance(r) for r in list(self._running.values())[: self.max_batch_size]]

    def _advance(self, running: _Running) -> StepOutput:
        request, stats = running.request, running.stats
        prompt = request.prompt_ids
        start = len(running.output)
        num_new = min(2, request.params.max_tokens - start)
        token_ids = tuple(prompt[i % len(prompt)] for i in range(start, start + num_new))
        running.output.extend(token_ids)
        stats.num_prompt_tokens = len(prompt)
        stats.num_output_tokens += num_new
        stats.num_offered_nodes += 5
        stats.add_step(kept=3, accepted=num_new - 1, batch_size=self.num_running, forward_s=0.001)
        stats.threshold_version = self.thresholds.version
        finish_reason: FinishReason | None = None
        if bytes(prompt).decode(errors="replace") in self.fail_requests and start:
            finish_reason = "error"
        elif len(running.output) == request.params.max_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            del self._running[request.request_id]
        return StepOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            text=bytes(token_ids).decode(errors="replace"),
            finish_reason=finish_reason,
            stats=stats if finish_reason is not None else None,
            error="injected" if finish_reason == "error" else None,
        )
