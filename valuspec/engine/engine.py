"""The engine: requests in, tokens out, one step at a time.

A step is: schedule -> draft -> value -> verify (one target forward) -> accept -> commit -> emit.
Draft trees and thresholds decide only which rows the target computes; `verify` alone decides what
is accepted, from the target's own choices.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from valuspec.cost import LiveCosts
from valuspec.drafting.drafter import Drafter
from valuspec.engine.acceptance import Acceptance
from valuspec.engine.block_pool import BlockPool
from valuspec.engine.head_source import HeadChoice, HeadSource
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.limits import validate_request
from valuspec.engine.places import BlockCopy, Places, blocks_for
from valuspec.engine.proposal import Filter, Proposer, keep_by_value
from valuspec.engine.rows import SequenceRows
from valuspec.engine.scheduler import PREFILL_ROWS, schedule
from valuspec.engine.sequence import Sequence
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, StepOutput
from valuspec.errors import RequestError
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree


class Engine:
    """Continuous decoding of a ragged batch. Not thread-safe: call everything from one thread."""

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter,
        thresholds: ThresholdSet,
        max_batch_size: int = 8,
        node_filter: Filter = keep_by_value,
        kv_tokens: int | None = None,
        reuse_prefixes: bool = True,
        head: HeadChoice | None = None,
    ) -> None:
        """kv_tokens: tokens whose keys and values the cache holds; what memory allows when None.
        reuse_prefixes: let requests of a namespace that begin alike share keys and values
        head: a draft head of the target, to propose beside the drafter or alone
        """
        self.target = target
        self.drafter = drafter
        self.thresholds = thresholds
        """Used by requests that begin from now on; running requests keep theirs."""
        self.max_batch_size = max_batch_size
        self.node_filter = node_filter
        self.live_costs = LiveCosts({})
        """Told how long each decode step's forward took."""
        self.counters: Counter[str] = Counter()
        per_sequence = blocks_for(target.max_model_len)
        if kv_tokens is None:
            kv_tokens = target.affordable_tokens(max_batch_size * per_sequence * BLOCK)
        num_blocks = max(1, kv_tokens // BLOCK)
        tables = np.zeros((max_batch_size, per_sequence), np.int64)
        self._cache = target.new_cache(tables, num_blocks)
        self._places = Places(tables, num_blocks, reuse_prefixes=reuse_prefixes)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        # In envelope mode all rows of a forward must fit the one width.
        self._row_limit = target.min_width if target.exact_mode == "envelope" else None
        self.head_source: HeadSource | None = None
        if head is not None:
            self.head_source = HeadSource(head, tables, num_blocks)
            target.show_features(self.head_source.layer_ids)
        self._proposer = Proposer(
            max_depth=target.max_tree_depth,
            vocab_size=target.vocab_size,
            max_rows=self._row_limit,
            counters=self.counters,
            head=self.head_source,
        )
        self._acceptance = Acceptance(self._cache, self.head_source)

    # ---- requests

    def validate(self, request: GenerationRequest) -> None:
        """Raise RequestError if the request can never be served."""
        validate_request(
            request,
            vocab_size=self.target.vocab_size,
            max_model_len=self.target.max_model_len,
            num_blocks=self.pool.num_blocks,
        )

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError as `validate` does, or for an id in use."""
        self.validate(request)
        if self._find(request.request_id) is not None:
            _refuse_id(request.request_id)
        self._waiting.append(Sequence(request, self.target.tokenizer))

    def attach_retrieved(self, request_id: str, trees: Iterable[DraftTree]) -> None:
        """Add retrieved draft trees to a request; ignored when it has ended."""
        sequence = self._find(request_id)
        if sequence is None:
            return
        if sequence.session is None:
            sequence.early_trees.extend(trees)
        else:
            sequence.session.add_retrieved(trees)

    def cancel(self, request_id: str) -> None:
        """Drop a request before the next step; unknown ids are ignored."""
        sequence = self._find(request_id)
        if sequence is None:
            return
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)

    def remember(self, trees: Iterable[tuple[str, DraftTree]]) -> None:
        """Add trees of earlier answers to their namespaces' shared store."""
        for namespace, tree in trees:
            self.drafter.remember_tree(namespace, tree)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def pool(self) -> BlockPool:
        """The cache's blocks."""
        return self._places.pool

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the cache holds."""
        return self.pool.num_blocks * BLOCK

    @property
    def kv_usage(self) -> float:
        """Share of the cache in use, 0 to 1; what is only kept for reuse is not."""
        return 1 - self.pool.num_available / self.pool.num_blocks

    def _find(self, request_id: str) -> Sequence | None:
        everyone = itertools.chain(self._running, self._waiting)
        return next((s for s in everyone if s.request.request_id == request_id), None)

    # ---- the step

    def step(self) -> list[StepOutput]:
        """Run one step and return what each request gained by it."""
        places = self._places
        plan = schedule(
            [places.as_running(s) for s in self._running],
            [places.as_waiting(s) for s in itertools.islice(self._waiting, len(places.free))],
            num_places=self.max_batch_size,
            num_blocks=self.pool.num_available,
            prefill_rows=self._row_limit or PREFILL_ROWS,
        )
        for index in plan.preempted:
            self._preempt(self._running[index])
        for _ in range(plan.num_admitted):
            self._admit(self._waiting.popleft())
        decoding = [self._running[index] for index in plan.decode]
        chunks = [(self._running[index], num_rows) for index, num_rows in plan.prefill]
        if self._row_limit is None:
            outputs = self._compute(decoding, chunks)
        else:  # rows of both may not fit the envelope together
            outputs = self._compute(decoding, []) + self._compute([], chunks)
        for sequence in self._running:
            places.offer(sequence)
        for sequence in [s for s in self._running if s.finish_reason is not None]:
            self._release(sequence)
        return outputs

    def _admit(self, sequence: Sequence) -> None:
        request = sequence.request
        copy = self._places.take(sequence)
        self._running.append(sequence)
        if copy is not None:
            self._copy(copy)
            # Only now: what counts as committed is shared when the sequence goes, however it goes.
            sequence.committed += copy.num_tokens
        if sequence.session is None:
            sequence.stats.num_cached_tokens = min(sequence.committed, len(request.prompt_ids))
            sequence.admit(self.thresholds, self.target.eos_token_ids)
            if request.params.speculative:
                sequence.session = self.drafter.start(request.namespace, request.prompt_ids)
                sequence.session.extend(sequence.output_ids)
                sequence.session.add_retrieved(sequence.early_trees)

    def _copy(self, copy: BlockCopy) -> None:
        within = np.arange(copy.num_tokens)
        self._cache.move(copy.source * BLOCK + within, copy.target * BLOCK + within)
        if self.head_source is not None:
            self.head_source.copy(copy.source, copy.target)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch; its place and blocks are free."""
        self._running.remove(sequence)
        if self.head_source is not None:
            self.head_source.forget(sequence.place)
        self._places.give_back(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Make room: the sequence computes its context anew when there is room again."""
        sequence.stats.num_preemptions += 1
        self._leave(sequence)
        self._waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._leave(sequence)
        request = sequence.request
        if sequence.finish_reason in ("stop", "length") and sequence.greedy:
            self.drafter.remember(request.namespace, request.prompt_ids, sequence.output_ids)

    # ---- what a step computes

    def _compute(
        self, decoding: list[Sequence], filling: list[tuple[Sequence, int]]
    ) -> list[StepOutput]:
        """One forward: the trees of `decoding`, and so many more rows of `filling`'s contexts."""
        if not decoding and not filling:
            return []
        started = time.perf_counter()
        for sequence in decoding:
            self._places.grow(sequence, sequence.committed)
        trees = self._proposer.rows(decoding, self.node_filter)
        chunks = [_next_chunk(sequence, num_rows) for sequence, num_rows in filling]
        num_tree_rows = sum(map(len, trees))
        wanted = np.arange(num_tree_rows)
        if chunks:
            ends = num_tree_rows + np.cumsum([len(chunk) for chunk in chunks]) - 1
            wanted = np.concatenate([wanted, ends])
        forward_started = time.perf_counter()
        logits = self.target.forward([*trees, *chunks], self._cache, wanted)
        self.target.wait()
        forward_s = time.perf_counter() - forward_started
        context = sum(sequence.committed for sequence in decoding)
        features = self.target.features if self.head_source is not None else None
        outputs = self._acceptance.accept(decoding, trees, logits, features, forward_s)
        elapsed = time.perf_counter() - started
        for sequence in decoding:
            sequence.stats.decode_s += elapsed
        if not filling:  # the measured costs are those of decoding alone
            self.live_costs.add(
                batch_size=len(decoding),
                num_rows=num_tree_rows,
                context=context,
                seconds=elapsed - self._proposer.head_seconds,
                drafting=self._proposer.seconds,
            )
        rows = itertools.count(num_tree_rows)
        for (sequence, _), chunk, row in zip(filling, chunks, rows, strict=False):
            sequence.committed += len(chunk)
            sequence.stats.prefill_s += elapsed
            if sequence.committed == sequence.context and not sequence.output_ids:
                outputs.append(self._acceptance.begin(sequence, logits, row))
        if self.head_source is not None and features is not None:
            chunked = [(s, chunk) for (s, _), chunk in zip(filling, chunks, strict=True)]
            self.head_source.observe_chunks(chunked, features[num_tree_rows:])
        return outputs


def _next_chunk(sequence: Sequence, num_rows: int) -> SequenceRows:
    """The next rows of a sequence's context, num_rows at most."""
    first = sequence.committed
    tokens = sequence.tokens(first, min(first + num_rows, sequence.context))
    return SequenceRows.chain(sequence.place, first, tokens)


def _refuse_id(request_id: str) -> NoReturn:
    raise RequestError(f"request id {request_id!r} is in use", param="request_id")
