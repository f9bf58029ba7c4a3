"""What gateway and target replica say to each other.

One HTTP request is one `GenerateCall`; the replica answers with a stream that is either a single
`Refusal` or `Delta`s, the last one of every choice carrying `finish_reason` and `report`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from valuspec.engine.types import FinishReason, RequestStats, SamplingParams

Message = dict[str, str]
"""{"role": …, "content": …}"""


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """One target replica. A call with it as first argument goes to that replica."""

    unique_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """`prompts` (text or token ids) or `messages`, each continued `n` times.

    Choice j of prompt i has index i * n + j and seed + j. `max_tokens` None means as many as fit.
    `tenant` comes from the API key and keeps the draft sources of tenants apart. `resumed` is set
    where the replica goes on with what a lost one began: the tokens sent so far of every choice
    that has not finished, by index; the others need nothing more.
    """

    request_id: str
    tenant: str
    params: SamplingParams
    max_tokens: int | None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Message, ...] | None = None
    n: int = 1
    session: str | None = None
    """Named by the client; requests of one session prefer one replica."""
    resumed: Mapping[int, tuple[int, ...]] | None = None
    avoided: frozenset[ReplicaName] = frozenset()
    """Replicas that no longer answer; for the router."""

    @property
    def num_choices(self) -> int:
        return max(len(self.prompts), 1) * self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why nothing will be generated, as an HTTP status and the fields of an OpenAI error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


@dataclass(slots=True, kw_only=True)
class RetrievalReport:
    """What retrieval brought for one request. `outcome` is "off" when it was not asked,
    and "late" when the answer was complete before it had replied."""

    outcome: str = "off"
    latency_s: float = 0.0
    num_trees: int = 0
    num_stored_nodes: int = 0
    """Nodes of the retrieved trees before the valuation deployment pruned them."""
    num_nodes: int = 0
    """Nodes that reached the replica."""
    valuation_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReport:
    """Counters of one finished choice."""

    stats: RequestStats
    retrieval: RetrievalReport
    time_to_first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens and settled text of choice `index`; text may lag behind the tokens."""

    index: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    report: ChoiceReport | None = None

    def then(self, other: Delta) -> Delta:
        """Both as one; `other` comes next of the same choice."""
        token_ids, text = self.token_ids + other.token_ids, self.text + other.text
        return replace(other, token_ids=token_ids, text=text)


Reply = Delta | Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a replica knows of its model once loaded."""

    name: str
    max_model_len: int
    exact: bool
    exact_mode: str
    dtype: str
    model_fingerprint: str
    loaded_at: int
    """Unix seconds."""
