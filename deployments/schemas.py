"""Request bodies of the OpenAI-compatible routes.

What would change the output and is not supported is refused with its name; silence would be a
wrong answer. Unknown fields are ignored. All caps apply before anything is tokenised.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from deployments.messages import GenerateCall, Message
from valuspec.engine.types import SamplingParams
from valuspec.errors import RequestError

MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES_PER_PROMPT = 128
MAX_MESSAGES = 2048
MAX_PROMPTS = 2048
MAX_FILTER_NODES = 1024

#: Parameters that are refused, and the values that ask for nothing and therefore pass.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "prediction": (),
    "audio": (),
    "modalities": (["text"],),
}

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
_Item = TypeVar("_Item")
Prompts = Annotated[list[_Item], Field(min_length=1, max_length=MAX_PROMPTS)]


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Repeat the usage so far on every chunk; needs include_usage."""


class Speculative(BaseModel):
    enabled: bool = True
    """False decodes one token per step; the text is the same."""


class GenerationRequestBody(BaseModel):
    """Fields the two generation routes share."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(default=0, ge=-1)
    """0 or -1 keeps all tokens."""
    seed: int | None = None
    """Draws are keyed by (seed, position); without one, a random seed is taken."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES_PER_PROMPT)
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = Field(default=None, max_length=256)
    """Requests of one user prefer one replica, where no x-session-id header says more."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """Narrows the tenant's draft store further: only equal salts share drafts."""
    speculative: Speculative = Speculative()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        for name, neutral in _UNSUPPORTED.items():
            value = body.get(name)
            if value is not None and not any(value == allowed for allowed in neutral):
                raise RequestError(
                    f"{name} is not supported; leave it out.", param=name, code="unsupported"
                )
        # An explicit null means "not given" in OpenAI's API.
        return {name: value for name, value in body.items() if value is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequestBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true.", param="stream_options")
        return self

    def sampling_params(self) -> SamplingParams:
        """Raise RequestError where a value is out of range. max_tokens is set by the replica."""
        seed = self.seed
        if seed is None:
            seed = 0 if self.temperature == 0 else secrets.randbits(62)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            speculative=self.speculative.enabled,
        )

    def salted(self, tenant: str) -> str:
        """Tenant name that keeps differently salted requests apart."""
        if self.cache_salt is None:
            return tenant
        return f"{tenant}#{hashlib.sha256(self.cache_salt.encode()).hexdigest()[:16]}"


class CompletionRequest(GenerationRequestBody):
    """POST /v1/completions."""

    prompt: Text | TokenIds | Prompts[Text] | Prompts[TokenIds]
    max_tokens: int = Field(default=16, ge=1)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _say_what_a_prompt_is(cls, prompt: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """One sentence instead of the violations of four union members."""
        try:
            return validate(prompt)
        except ValidationError:
            raise RequestError(
                "prompt must be a string, a list of token ids, or a list of at most "
                f"{MAX_PROMPTS} of either, none of them empty.",
                param="prompt",
            ) from None

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """One entry per prompt: text, or token ids."""
        match self.prompt:
            case str(text):
                return (text,)
            case [int(), *_] as ids:
                return (tuple(ids),)  # type: ignore[arg-type]  # all int by the schema
            case entries:
                return tuple(e if isinstance(e, str) else tuple(e) for e in entries)  # type: ignore[arg-type]

    def call(self, request_id: str, tenant: str, session: str | None = None) -> GenerateCall:
        return GenerateCall(
            request_id=request_id,
            tenant=self.salted(tenant),
            params=self.sampling_params(),
            max_tokens=self.max_tokens,
            prompts=self.prompts(),
            n=self.n,
            session=session or self.user,
        )


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Other roles and content parts (images, tool calls) are refused by the schema."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> Message:
        if isinstance(self.content, str):
            content = self.content
        else:
            content = "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatCompletionRequest(GenerationRequestBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def call(self, request_id: str, tenant: str, session: str | None = None) -> GenerateCall:
        return GenerateCall(
            request_id=request_id,
            tenant=self.salted(tenant),
            params=self.sampling_params(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            messages=tuple(message.plain() for message in self.messages),
            n=self.n,
            session=session or self.user,
        )


class TokenizeRequest(BaseModel):
    """POST /tokenize: `prompt` as it stands, or `messages` through the chat template."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    tokens: list[TokenId]


class FilterRequest(BaseModel):
    """POST /v1/valuspec/filter: a draft tree of any framework, as flat arrays.

    `probabilities` are the draft model's, each given the node's parent (EAGLE's, for one);
    without them `counts` say how often each node was taken where it was seen before.
    """

    tokens: Annotated[list[TokenId], Field(max_length=MAX_FILTER_NODES)]
    parents: Annotated[
        list[Annotated[int, Field(ge=-1, lt=MAX_FILTER_NODES)]], Field(max_length=MAX_FILTER_NODES)
    ]
    """-1 hangs off the context; otherwise the index of an earlier node."""
    probabilities: (
        Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=MAX_FILTER_NODES)]
        | None
    ) = None
    counts: (
        Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(max_length=MAX_FILTER_NODES)]
        | None
    ) = None
    batch_size: int = Field(default=1, ge=1)
    """Requests that share the target's forward: a node costs more when it is busy."""
    max_nodes: int = Field(default=64, ge=1, le=MAX_FILTER_NODES)
