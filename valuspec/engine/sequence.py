"""One request inside the engine: what it holds, and how accepted tokens become output."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from valuspec.drafting.drafter import DraftSession
from valuspec.engine import block_pool
from valuspec.engine.block_pool import Key, root_key
from valuspec.engine.kv_cache import BLOCK, Int64Array
from valuspec.engine.text import TextStream
from valuspec.engine.types import FinishReason, GenerationRequest, RequestStats, StepOutput
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree


class Sequence:
    """State of a request from `Engine.add` to its last token.

    place:     row of the cache's block tables while running
    blocks:    its blocks of the cache, in position order
    keys:      keys of the full blocks of all its tokens, in position order
    committed: tokens in the cache that belong to the sequence
    pending:   last output token; its keys and values are not in the cache yet
    """

    def __init__(self, request: GenerationRequest, tokenizer: Any) -> None:
        params = request.params
        self.request = request
        self.greedy = params.greedy
        self.stats = RequestStats(num_prompt_tokens=len(request.prompt_ids))
        self.place = -1
        self.blocks: list[int] = []
        self.keys: list[Key] = []
        self.num_kept = 0
        """Leading blocks that have been offered for sharing."""
        self.committed = 0
        self.pending = request.resumed_ids[-1] if request.resumed_ids else -1
        self.output_ids = list(request.resumed_ids)
        self.session: DraftSession | None = None
        self.early_trees: list[DraftTree] = []
        """Retrieved trees that came before the request was admitted."""
        self.finish_reason: FinishReason | None = None
        self.thresholds: ThresholdSet
        self._stop_ids = frozenset(params.stop_token_ids)
        self._text = (
            None if tokenizer is None else TextStream(tokenizer, request.prompt_ids, params.stop)
        )
        if self._text is not None:
            for token_id in request.resumed_ids:  # their text has been sent
                self._text.push(token_id)
        self._added_at = time.perf_counter()

    @property
    def remaining_tokens(self) -> int:
        return self.request.params.max_tokens - len(self.output_ids)

    @property
    def context(self) -> int:
        """Tokens to have in the cache before the next output token can be decoded."""
        return len(self.request.prompt_ids) + max(0, len(self.output_ids) - 1)

    def tokens(self, first: int, last: int) -> Int64Array:
        """Tokens at positions first to last - 1, prompt and output."""
        prompt = self.request.prompt_ids
        if last <= len(prompt):
            return np.array(prompt[first:last], np.int64)
        return np.array([*prompt, *self.output_ids][first:last], np.int64)

    def extend_keys(self) -> list[Key]:
        """Keys of the full blocks of the context."""
        while (end := (len(self.keys) + 1) * BLOCK) <= self.context:
            before = self.keys[-1] if self.keys else root_key(self.request.namespace)
            self.keys.append(block_pool.next_key(before, self.tokens(end - BLOCK, end)))
        return self.keys

    def key_before(self, index: int) -> Key:
        """Key of the context before block `index`, which are full blocks."""
        return self.extend_keys()[index - 1] if index else root_key(self.request.namespace)

    def admit(self, thresholds: ThresholdSet, eos_token_ids: frozenset[int]) -> None:
        """Begin to run, with this threshold set until the end."""
        self.thresholds = thresholds
        self.stats.threshold_version = thresholds.version
        self.stats.queue_s = time.perf_counter() - self._added_at
        if not self.request.params.ignore_eos:
            self._stop_ids |= eos_token_ids

    def emit(self, token_ids: tuple[int, ...]) -> StepOutput:
        """Append tokens one by one, as plain decoding would, until the output ends.

        Tokens behind the end are dropped: an accepted run may reach past a stop token, a stop
        string or max_tokens.
        """
        text: list[str] = []
        taken: list[int] = []
        for token_id in token_ids:
            taken.append(token_id)
            self.output_ids.append(token_id)
            self.finish_reason = self._push(token_id, text)
            if self.finish_reason is not None:
                break
        self.pending = taken[-1]
        self.stats.num_output_tokens += len(taken)
        if self.finish_reason is not None and self._text is not None:
            text.append(self._text.finish())
        if self.session is not None and self.finish_reason is None:
            self.session.extend(taken)
        return StepOutput(
            request_id=self.request.request_id,
            token_ids=tuple(taken),
            text="".join(text),
            finish_reason=self.finish_reason,
            stats=self.stats if self.finish_reason is not None else None,
        )

    def _push(self, token_id: int, text: list[str]) -> FinishReason | None:
        if token_id in self._stop_ids:
            return "stop"  # a stop token is counted, but not shown
        if self._text is not None:
            text.append(self._text.push(token_id))
            if self._text.stopped:
                return "stop"
        return "length" if self.remaining_tokens == 0 else None
