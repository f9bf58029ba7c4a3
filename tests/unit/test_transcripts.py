"""Prompts and answers of any server, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs.transcripts import UNLIMITED, Transcript, read_transcripts


class Words:
    """A tokenizer: a token is a word's length; 1 begins a text, 0 ends one."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [len(word) for word in text.split()]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        if not messages:
            raise ValueError("no messages")
        return " ".join(m["content"] for m in messages) + " assistant"


def read(tmp_path: Path, *records: Any, tokenizer: Words | None = None) -> Transcript:
    path = tmp_path / "answers.jsonl"
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return read_transcripts([path], tokenizer)


def test_token_ids_need_no_tokenizer(tmp_path) -> None:
    record = {"prompt_ids": [5, 6], "answer_ids": [7, 8, 9], "tenant": "a", "max_tokens": 16}
    (read_one,) = read(tmp_path, record).trajectories
    assert read_one.prompt_ids.tolist() == [5, 6]
    assert read_one.output_ids.tolist() == [7, 8, 9]
    assert (read_one.namespace, read_one.max_tokens) == ("a", 16)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt_token_ids": [5, 6], "token_ids": [7, 8]},
        {"input_ids": [5, 6], "output_ids": [7, 8]},
        {"prompt": [5, 6], "output_token_ids": [7, 8], "text": "what they spell"},
    ],
)
def test_names_of_other_servers(tmp_path, record) -> None:
    (read_one,) = read(tmp_path, record).trajectories
    assert (read_one.prompt_ids.tolist(), read_one.output_ids.tolist()) == ([5, 6], [7, 8])


@pytest.mark.parametrize("answer", ["answer", "completion", "response", "generated_text"])
def test_text_goes_through_the_tokenizer(tmp_path, answer) -> None:
    record = {"prompt": "say a word", answer: "some thing"}
    (read_one,) = read(tmp_path, record, tokenizer=Words()).trajectories
    assert read_one.prompt_ids.tolist() == [1, 3, 1, 4]
    assert read_one.output_ids.tolist() == [4, 5]  # an answer begins with no special token


def test_a_stopped_answer_gets_its_last_token_back(tmp_path) -> None:
    record = {"prompt": "say", "answer": "some thing", "finish_reason": "stop"}
    (read_one,) = read(tmp_path, record, tokenizer=Words()).trajectories
    assert read_one.output_ids.tolist() == [4, 5, 0]


def test_a_conversation_may_end_with_the_answer(tmp_path) -> None:
    asked = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "some thing"}]
    (read_one,) = read(tmp_path, {"messages": asked}, tokenizer=Words()).trajectories
    assert read_one.prompt_ids.tolist() == [3, 9]
    assert read_one.output_ids.tolist() == [4, 5]


def test_drafts_reach_as_far_as_the_request_allowed(tmp_path) -> None:
    ids = {"prompt_ids": [5], "answer_ids": [7, 8]}
    records = [
        ids,
        ids | {"finish_reason": "length"},
        ids | {"max_tokens": 9},
        ids | {"max_tokens": 1},
        ids | {"max_tokens": "9"},
    ]
    found = [t.max_tokens for t in read(tmp_path, *records).trajectories]
    assert found == [UNLIMITED, 2, 9, UNLIMITED, UNLIMITED]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([1], "not an object"),
        ({"answer_ids": [1, 2]}, "no prompt"),
        ({"prompt_ids": [1]}, "no answer"),
        ({"prompt_ids": [], "answer_ids": [1, 2]}, "empty prompt"),
        ({"prompt_ids": [1], "answer_ids": [1]}, "answer shorter than two tokens"),
        ({"prompt_ids": [1], "answer_ids": [1, -2]}, "token ids out of range"),
        ({"prompt_ids": [1], "answer_ids": [1, 2**31]}, "token ids out of range"),
        ({"prompt_ids": [1], "answer_ids": [1, 2**70]}, "token ids that are not a list"),
        ({"prompt_ids": [1], "answer_ids": [1.5, 2]}, "token ids that are not a list"),
        ({"prompt_ids": [True], "answer_ids": [1, 2]}, "token ids that are not a list"),
        ({"prompt_ids": [[1], [2, 3]], "answer_ids": [1, 2]}, "token ids that are not a list"),
        ({"prompt_ids": {"a": 1}, "answer_ids": [1, 2]}, "token ids that are not a list"),
        ({"prompt": "say", "answer": "some thing"}, "text, and no tokenizer given"),
        ({"messages": [{"role": "user", "content": "say"}], "answer": "x"}, "text, and no"),
    ],
)
def test_unusable_lines_are_counted_and_the_rest_is_read(tmp_path, record, reason) -> None:
    good = {"prompt_ids": [5], "answer_ids": [7, 8]}
    transcript = read(tmp_path, good, record, good)
    assert len(transcript.trajectories) == 2
    ((found, count),) = transcript.skipped.items()
    assert found.startswith(reason)
    assert count == 1


def test_messages_that_a_template_refuses(tmp_path) -> None:
    transcript = read(tmp_path, {"messages": [], "answer": "some thing"}, tokenizer=Words())
    assert transcript.skipped == {"messages the chat template refuses": 1}


def test_a_request_counts_once(tmp_path) -> None:
    """An answer that met itself in the store would be drafted whole."""
    record = {"prompt_ids": [5], "answer_ids": [7, 8], "id": "a"}
    transcript = read(tmp_path, record, record | {"id": "b"}, record)
    assert len(transcript.trajectories) == 2
    assert transcript.skipped == {"duplicate id": 1}
