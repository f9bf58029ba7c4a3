"""What goes into the engine and what comes out. No torch here: servers import it alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from valuspec.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]

#: Longest stop string, in characters: bounds the text held back while a match is possible.
MAX_STOP_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to generate: greedy at temperature 0, else draws keyed by (seed, position)."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculative: bool = True
    """False decodes one token a step; the tokens are the same either way."""

    def __post_init__(self) -> None:
        """Raise RequestError naming the first parameter out of range."""
        rules = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("seed", 0 <= self.seed < 2**63, "between 0 and 2^63 - 1"),
            (
                "stop",
                all(0 < len(s) <= MAX_STOP_CHARS for s in self.stop),
                f"strings of 1 to {MAX_STOP_CHARS} characters",
            ),
        ]
        for name, holds, limit in rules:
            if not holds:
                value = getattr(self, name)
                raise RequestError(f"{name} is {value!r}; it must be {limit}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue. `namespace` keeps tenants apart in every draft source."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = "default"
    resumed_ids: tuple[int, ...] = ()
    """Output that another engine gave before it was lost; this one goes on behind it, as after a
    preemption, and gives nothing of it again. It counts towards max_tokens."""


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Counters of one request. Times are seconds; `num_accepted_tokens` excludes bonus tokens."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values an earlier request had left in the cache."""
    num_preemptions: int = 0
    """How often the request gave its place in the cache back and computed its context anew."""
    num_output_tokens: int = 0
    """Without those the request was resumed with."""
    num_steps: int = 0
    """Target forwards after prefill; each yields its accepted tokens and one bonus token."""
    num_offered_nodes: int = 0
    """Candidate nodes before valuation."""
    num_draft_tokens: int = 0
    """Nodes kept by valuation, i.e. verified by the target."""
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=lambda: [0] * 17)
    """Entry k counts the steps that accepted k draft tokens."""
    kept: list[int] = field(default_factory=list)
    """Nodes verified in each step."""
    accepted: list[int] = field(default_factory=list)
    """Draft tokens accepted in each step."""
    batch_size: list[int] = field(default_factory=list)
    """Requests that shared each step's forward, this one included."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    valuation_s: float = 0.0
    forward_s: float = 0.0
    threshold_version: str = ""

    def add_step(self, *, kept: int, accepted: int, batch_size: int, forward_s: float) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_draft_tokens += kept
        self.num_accepted_tokens += accepted
        self.acceptance_histogram[accepted] += 1
        self.forward_s += forward_s
        self.kept.append(kept)
        self.accepted.append(accepted)
        self.batch_size.append(batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one engine step produced for one request.

    `text` is the newly settled text: held back while it could begin a stop string or end inside
    a UTF-8 sequence. `finish_reason` and `stats` are set on the request's last output only.
    `error` is a message for the operator's log, set when finish_reason is "error".
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str | None = None
