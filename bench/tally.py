"""How far the outputs of one mode of decoding agree with plain decoding's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.recorder import Output


@dataclass(slots=True)
class Tally:
    """Agreement of one mode with plain decoding."""

    requests: int = 0
    identical: int = 0
    tokens: int = 0
    logit_rows_checked: int = 0
    logit_rows_equal: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    mixed_steps: int = 0
    """Steps that computed prompts beside decoding."""
    preemptions: int = 0
    batch_sizes: set[int] = field(default_factory=set)
    differing: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return (
            self.requests > 0
            and self.identical == self.requests
            and self.logit_rows_equal == self.logit_rows_checked
        )

    def compare(self, request_id: str, plain: Output, speculative: Output) -> None:
        """Rows of logits are compared as far as their contexts agree."""
        self.requests += 1
        self.tokens += len(speculative.token_ids)
        same = (plain.token_ids, plain.text, plain.finish_reason) == (
            speculative.token_ids, speculative.text, speculative.finish_reason,
        )  # fmt: skip
        self.identical += same
        if not same:
            self.differing.append(request_id)
        pairs = zip(plain.token_ids, speculative.token_ids, strict=False)
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        end = None if agreed is None else agreed + 1
        rows = list(zip(plain.digests[:end], speculative.digests[:end], strict=False))
        self.logit_rows_checked += len(rows)
        self.logit_rows_equal += sum(a == b for a, b in rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "identical": self.identical,
            "tokens": self.tokens,
            "logit_rows_checked": self.logit_rows_checked,
            "logit_rows_equal": self.logit_rows_equal,
            "exact": self.exact,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "mixed_steps": self.mixed_steps,
            "preemptions": self.preemptions,
            "batch_sizes": sorted(self.batch_sizes - {0}),
            "differing": self.differing[:16],
        }
