"""Response objects: whole ones, and the chunks of a stream.

The order clients rely on: the role comes first, `finish_reason` with a choice's last text, then
one chunk with usage and empty `choices` if the client asked for it, then `[DONE]`. A failure in
mid-stream is an error event and no `[DONE]`: a cut answer must not look complete.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from deployments.errors import ApiError
from deployments.messages import ChoiceReport, Delta
from deployments.metrics import response_metrics
from deployments.schemas import GenerationRequestBody

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
JsonObject = dict[str, Any]

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(body: JsonObject) -> bytes:
    """One server-sent event."""
    return f"data: {_JSON.encode(body)}\n\n".encode()


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    report: ChoiceReport | None = None


@dataclass(slots=True, kw_only=True)
class Answer:
    """Builds the response objects of one request; one id and one `created` on all of them."""

    route: Literal["chat", "completions"]
    request_id: str
    model: str
    n: int
    num_choices: int
    return_token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _prompt_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, delta: Delta) -> bool:
        """Take in `delta`; return whether its choice is new."""
        is_new = delta.index not in self._choices
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.text.append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.finish_reason = delta.finish_reason
        choice.report = delta.report
        self._prompt_tokens[delta.index // self.n] = delta.num_prompt_tokens
        return is_new

    def chunks(self, delta: Delta) -> list[JsonObject]:
        """Take in `delta`; return its chunks, a role chunk first where the choice is new."""
        is_new = self.add(delta)
        chunks = []
        if self.route == "chat":
            if is_new:
                role = {"role": "assistant", "content": ""}
                chunks.append(self._chunk(delta.index, {"delta": role}, None))
            body: JsonObject = {"delta": {"content": delta.text} if delta.text else {}}
        else:
            body = {"text": delta.text}
        if self.return_token_ids:
            body["token_ids"] = list(delta.token_ids)
        if delta.text or delta.finish_reason or self.return_token_ids:
            chunks.append(self._chunk(delta.index, body, delta.finish_reason))
        return chunks

    def usage(self) -> JsonObject:
        prompt = sum(self._prompt_tokens.values())
        completion = sum(len(choice.token_ids) for choice in self._choices.values())
        # Known of choices that have finished; a prompt's choices count once, as its tokens do.
        first = [c.report for i, c in self._choices.items() if i % self.n == 0 and c.report]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(report.stats.num_cached_tokens for report in first)
            },
        }

    def usage_chunk(self) -> JsonObject:
        body = self._envelope(".chunk")
        return body | {"choices": [], "usage": self.usage()} | self._metrics()

    def response(self) -> JsonObject:
        """The whole answer, once every choice has finished."""
        body = self._envelope()
        body["choices"] = [
            self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)
        ]
        return body | {"usage": self.usage()} | self._metrics()

    def _whole_choice(self, index: int, choice: _Choice) -> JsonObject:
        text = "".join(choice.text)
        if self.route == "chat":
            body: JsonObject = {"message": {"role": "assistant", "content": text}}
        else:
            body = {"text": text}
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
        body |= {"logprobs": None, "finish_reason": choice.finish_reason}
        return {"index": index} | body

    def _chunk(self, index: int, body: JsonObject, finish_reason: str | None) -> JsonObject:
        choice = {"index": index} | body | {"logprobs": None, "finish_reason": finish_reason}
        return self._envelope(".chunk") | {"choices": [choice]}

    def _envelope(self, chunk: str = "") -> JsonObject:
        is_chat = self.route == "chat"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.request_id}",
            "object": f"chat.completion{chunk}" if is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _metrics(self) -> JsonObject:
        """Only with one choice: counters of several would be a mixture."""
        report = self._choices[0].report if self.num_choices == 1 else None
        return {"metrics": response_metrics(report)} if report is not None else {}


async def stream_events(
    answer: Answer, deltas: AsyncIterator[Delta | None], body: GenerationRequestBody
) -> AsyncGenerator[bytes]:
    """Yield the events of a stream. A None among `deltas` is a long gap and becomes a ping."""
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    continuous = options is not None and include_usage and options.continuous_usage_stats
    try:
        async for delta in deltas:
            if delta is None:
                yield PING
                continue
            for chunk in answer.chunks(delta):
                if include_usage:
                    chunk["usage"] = answer.usage() if continuous else None
                yield event(chunk)
    except ApiError as error:
        yield event(error.body())
        return
    if include_usage:
        yield event(answer.usage_chunk())
    yield DONE
