"""Output text, token by token: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

#: Prompt tokens that precede the output when decoding, so that leading spaces come out right.
_CONTEXT = 6


class TextStream:
    """Turns one request's output tokens into text.

    `push` takes one token at a time, also when a step accepted several, so that a stop string in
    the middle of an accepted run ends the output at the same token as plain decoding.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context = list(prompt_ids[-_CONTEXT:])
        for token_id in self._context:
            self._stream.step(self._backend, token_id)
        self._undecoded: list[int] = []
        self._stop = tuple(stop)
        self._held = ""  # decoded, but may be the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Return the text this token settles; sets `stopped` when a stop string is complete."""
        self._undecoded.append(token_id)
        decoded = self._stream.step(self._backend, token_id)
        if decoded is None:
            return ""
        self._context = (self._context + self._undecoded)[-_CONTEXT:]
        self._undecoded.clear()
        return self._release(decoded)

    def finish(self) -> str:
        """Return what was held back: no stop string came, or a character stayed incomplete."""
        if self.stopped:
            return ""
        decode = self._tokenizer.decode
        before = decode(self._context, skip_special_tokens=True)
        after = decode(self._context + self._undecoded, skip_special_tokens=True)
        tail = after[len(before) :] if after.startswith(before) else ""
        self._undecoded.clear()
        text = self._release(tail)
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, decoded: str) -> str:
        text = self._held + decoded
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
