"""The choices a call asks for, tokenised and checked before any is admitted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deployments.loading import Engine, Target
from deployments.messages import GenerateCall, RetrievalReport
from retrieval.tenants import Owner
from valuspec.engine.types import GenerationRequest
from valuspec.errors import RequestError

#: A text of more characters per token of context than this is tokenised in part first.
_CHARS_TO_TRY = 8


@dataclass(slots=True)
class Choice:
    """A choice being generated."""

    index: int
    owner: Owner
    request: GenerationRequest
    retrieval: RetrievalReport
    output_ids: list[int] = field(default_factory=list)
    first_token_s: float | None = None


def make_choices(call: GenerateCall, target: Target, engine: Engine) -> list[Choice]:
    """All choices of a call that are not finished elsewhere. Raises RequestError."""
    if call.messages is not None:
        _check_length("".join(message["content"] for message in call.messages), target)
        prompts = [target.render_chat(list(call.messages))]
    else:
        prompts = [
            _encode(prompt, target) if isinstance(prompt, str) else list(prompt)
            for prompt in call.prompts
        ]
    owner = Owner(call.tenant, target.model_fingerprint, target.tokenizer_fingerprint)
    space = owner.namespace
    choices: list[Choice] = []
    for number, prompt_ids in enumerate(prompts):
        room = target.max_model_len - len(prompt_ids)
        max_tokens = max(room, 1) if call.max_tokens is None else call.max_tokens
        retrieval = RetrievalReport()  # one lookup, shared by the prompt's choices
        for repeat in range(call.n):
            index = number * call.n + repeat
            if call.resumed is not None and index not in call.resumed:
                continue
            resumed_ids = call.resumed[index] if call.resumed is not None else ()
            seed = (call.params.seed + repeat) % 2**63
            request = GenerationRequest(
                request_id=f"{call.request_id}-{index}",
                prompt_ids=tuple(prompt_ids),
                params=replace(call.params, max_tokens=max_tokens, seed=seed),
                namespace=space,
                resumed_ids=resumed_ids,
            )
            engine.validate(request)
            choices.append(Choice(index, owner, request, retrieval, list(resumed_ids)))
    return choices


def _encode(prompt: str, target: Target) -> list[int]:
    _check_length(prompt, target)
    return target.encode(prompt)


def _check_length(prompt: str, target: Target) -> None:
    """Raise RequestError for a text far too long, without tokenising all of it."""
    limit = target.max_model_len
    if len(prompt) > limit * _CHARS_TO_TRY:
        num_tokens = len(target.encode(prompt[: limit * _CHARS_TO_TRY]))
        if num_tokens > limit + 1:  # one token may end differently where the text was cut
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, but the prompt has "
                f"more than {num_tokens - 1}. Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
