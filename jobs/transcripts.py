"""Prompts and answers of any server, from JSON lines.

One object a line, in the order the answers were given:

    prompt          text, or  messages   [{"role", "content"}], or  prompt_ids  [int]
    answer          text, or  answer_ids [int], or the last of the messages, the assistant's
    id              optional; a later line with the same id is dropped
    tenant          optional; tenants share no drafts
    max_tokens      optional; most tokens the request allowed
    finish_reason   optional; "stop" appends the end-of-sequence token to an answer given as text

The names vLLM and SGLang write are understood too: see ALIASES. Lines that cannot be used are
skipped and counted by reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from valuspec.replay import Trajectory

ALIASES = {
    "prompt_ids": ("prompt_token_ids", "input_ids"),
    "answer": ("output", "completion", "response", "generated_text", "text"),
    "answer_ids": ("output_ids", "output_token_ids", "token_ids"),
    "tenant": ("namespace", "user"),
    "id": ("request_id",),
}
MAX_TOKEN_ID = 2**31 - 1
UNLIMITED = 1 << 20
"""max_tokens where a line does not say: no draft is cut short."""


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


class UnusableLineError(ValueError):
    """A line that is skipped; its text is the reason it is counted under."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """Answers in order, and what was left out."""

    trajectories: list[Trajectory]
    skipped: Counter[str]


def read_transcripts(paths: Sequence[Path], tokenizer: Tokenizer | None = None) -> Transcript:
    """Read all files, one after the other. Raises OSError for a file that cannot be opened.

    Without a tokenizer, lines that hold text are skipped.
    """
    trajectories: list[Trajectory] = []
    skipped: Counter[str] = Counter()
    seen: set[str] = set()
    for line in _lines(paths):
        try:
            id_, trajectory = parse_line(line, tokenizer)
            if id_ is not None and id_ in seen:
                raise UnusableLineError("duplicate id")
        except UnusableLineError as reason:
            skipped[str(reason)] += 1
            continue
        if id_ is not None:
            seen.add(id_)
        trajectories.append(trajectory)
    return Transcript(trajectories, skipped)


def _lines(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())


def parse_line(line: bytes, tokenizer: Tokenizer | None) -> tuple[str | None, Trajectory]:
    """(id, trajectory) of one line, or raise UnusableLineError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UnusableLineError("not JSON") from None
    if not isinstance(record, dict):
        raise UnusableLineError("not an object")
    for name, others in ALIASES.items():
        values = (record.get(key) for key in (name, *others))
        record[name] = next((value for value in values if value is not None), None)
    _split_conversation(record)
    prompt, answer = _prompt(record, tokenizer), _answer(record, tokenizer)
    if not len(prompt):
        raise UnusableLineError("empty prompt")
    if len(answer) < 2:  # the first token comes from prefill: there is nothing to draft
        raise UnusableLineError("answer shorter than two tokens")
    limit = record.get("max_tokens")
    if not isinstance(limit, int) or limit < len(answer):
        limit = len(answer) if record.get("finish_reason") == "length" else UNLIMITED
    id_, tenant = record["id"], record["tenant"]
    return None if id_ is None else str(id_), Trajectory(
        prompt, answer, limit, namespace="default" if tenant is None else str(tenant)
    )


def _split_conversation(record: dict[str, Any]) -> None:
    """Take the answer off a conversation that ends with it, as fine-tuning files have it."""
    messages = record.get("messages")
    if record["answer"] is None and record["answer_ids"] is None and isinstance(messages, list):
        match messages:
            case [*asked, {"role": "assistant", "content": answer}]:
                record["messages"], record["answer"] = asked, answer


def _prompt(record: Mapping[str, Any], tokenizer: Tokenizer | None) -> NDArray[np.int32]:
    if record["prompt_ids"] is not None:
        return _token_ids(record["prompt_ids"])
    text, messages = record.get("prompt"), record.get("messages")
    if isinstance(text, list) and text and isinstance(text[0], int):
        return _token_ids(text)
    if text is None and messages is None:
        raise UnusableLineError("no prompt")
    if tokenizer is None:
        raise UnusableLineError("text, and no tokenizer given")
    if isinstance(text, str):
        return _token_ids(tokenizer.encode(text))
    try:
        rendered = tokenizer.apply_chat_template(
            messages or [], add_generation_prompt=True, tokenize=False
        )
    except Exception:  # noqa: BLE001 - a chat template may raise anything
        raise UnusableLineError("messages the chat template refuses") from None
    # The template has written the special tokens already.
    return _token_ids(tokenizer.encode(rendered, add_special_tokens=False))


def _answer(record: Mapping[str, Any], tokenizer: Tokenizer | None) -> NDArray[np.int32]:
    if record["answer_ids"] is not None:
        return _token_ids(record["answer_ids"])
    text = record["answer"]
    if not isinstance(text, str):
        raise UnusableLineError("no answer")
    if tokenizer is None:
        raise UnusableLineError("text, and no tokenizer given")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if record.get("finish_reason") == "stop" and tokenizer.eos_token_id is not None:
        token_ids = [*token_ids, tokenizer.eos_token_id]
    return _token_ids(token_ids)


def _token_ids(values: Any) -> NDArray[np.int32]:
    try:
        token_ids = np.asarray(values)
    except ValueError:  # ragged
        raise UnusableLineError("token ids that are not a list of integers") from None
    if token_ids.size == 0:
        return np.empty(0, np.int32)
    if token_ids.ndim != 1 or token_ids.dtype.kind != "i":
        raise UnusableLineError("token ids that are not a list of integers")
    if token_ids.min() < 0 or token_ids.max() > MAX_TOKEN_ID:
        raise UnusableLineError("token ids out of range")
    return token_ids.astype(np.int32)
