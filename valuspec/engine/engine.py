"""The engine: requests in, tokens out, one step at a time.

A step is: schedule -> draft -> value -> verify (one target forward) -> accept -> commit -> emit.
Draft trees and thresholds decide only which rows the target computes; `verify` alone decides what
is accepted, from the target's own choices.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.cost import LiveCosts
from valuspec.drafting.drafter import Drafter, DraftSession
from valuspec.engine.rows import SequenceRows
from valuspec.engine.sampling import greedy_token, sample_token
from valuspec.engine.scheduler import PREFILL_CHUNK, Running, schedule
from valuspec.engine.sequence import Sequence
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, StepOutput
from valuspec.engine.verify import Verdict, verify
from valuspec.errors import RequestError
from valuspec.evidence import CandidateTree
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree
from valuspec.valuation import keep

logger = logging.getLogger(__name__)

#: Largest candidate tree of one sequence.
MAX_TREE_NODES = 64
#: Chooses nodes to verify: (candidate, thresholds, batch size, most nodes) -> ascending indices.
Filter = Callable[[CandidateTree, ThresholdSet, int, int], NDArray[np.int32]]


def keep_by_value(
    candidate: CandidateTree, thresholds: ThresholdSet, batch_size: int, max_nodes: int
) -> NDArray[np.int32]:
    """The filter of this project; benches swap in others."""
    return keep(candidate, thresholds, batch_size=batch_size, max_nodes=max_nodes)


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
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.thresholds = thresholds
        """Used by requests that begin from now on; running requests keep theirs."""
        self.max_batch_size = max_batch_size
        self.node_filter = node_filter
        self.live_costs = LiveCosts({})
        """Told how long each decode step's forward took."""
        self.counters: Counter[str] = Counter()
        self._cache = target.new_cache(max_batch_size)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # index == place in the cache
        # In envelope mode all rows of a forward must fit the one width.
        self._row_limit = target.min_width if target.exact_mode == "envelope" else None

    # ---- requests

    def validate(self, request: GenerationRequest) -> None:
        """Raise RequestError if the request can never be served."""
        prompt, limit = request.prompt_ids, self.target.max_model_len
        if not prompt:
            raise RequestError("the prompt has no tokens", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
            raise RequestError(
                f"prompt token ids must lie in 0..{self.target.vocab_size - 1}", param="prompt"
            )
        wanted = len(prompt) + request.params.max_tokens
        if wanted > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, but {wanted} were "
                f"requested ({len(prompt)} in the prompt, {request.params.max_tokens} for the "
                "output). Shorten the prompt or lower max_tokens.",
                param="prompt",
                code="context_length_exceeded",
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
            self._release([sequence])

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _find(self, request_id: str) -> Sequence | None:
        everyone = itertools.chain(self._running, self._waiting)
        return next((s for s in everyone if s.request.request_id == request_id), None)

    # ---- the step

    def step(self) -> list[StepOutput]:
        """Run one step and return what each request gained by it."""
        plan = schedule(
            [Running(len(s.request.prompt_ids), s.computed_prompt) for s in self._running],
            [len(s.request.prompt_ids) for s in self._waiting],
            max_batch_size=self.max_batch_size,
            prefill_chunk=self._row_limit or PREFILL_CHUNK,
        )
        for _ in range(plan.num_admitted):
            self._admit(self._waiting.popleft())
        outputs: list[StepOutput] = []
        if plan.decode:
            outputs += self._decode([self._running[place] for place in plan.decode])
        if plan.prefill is not None:
            place, first, last = plan.prefill
            outputs += self._prefill(self._running[place], first, last)
        self._release([s for s in self._running if s.finish_reason is not None])
        return outputs

    def _admit(self, sequence: Sequence) -> None:
        request = sequence.request
        slots = len(request.prompt_ids) + request.params.max_tokens + MAX_TREE_NODES + 1
        self._cache.reserve(slots)
        sequence.place = len(self._running)
        self._running.append(sequence)
        sequence.admit(self.thresholds, self.target.eos_token_ids)
        if request.params.speculative:
            sequence.session = self.drafter.start(request.namespace, request.prompt_ids)
            sequence.session.add_retrieved(sequence.early_trees)

    def _prefill(self, sequence: Sequence, first: int, last: int) -> list[StepOutput]:
        started = time.perf_counter()
        prompt = sequence.request.prompt_ids
        rows = SequenceRows.chain(sequence.place, first, np.array(prompt[first:last]))
        logits = self.target.forward([[rows]], self._cache, np.array([last - first - 1]))
        sequence.computed_prompt = sequence.committed = last
        sequence.stats.prefill_s += time.perf_counter() - started
        if last < len(prompt):
            return []
        return [sequence.emit((self._choose(sequence, logits[0], 0),))]

    def _decode(self, sequences: list[Sequence]) -> list[StepOutput]:
        started = time.perf_counter()
        rows = [self._draft(sequence, len(sequences)) for sequence in sequences]
        forward_started = time.perf_counter()
        logits = self.target.forward(_neighbours(rows), self._cache)
        self.target.wait()
        forward_s = time.perf_counter() - forward_started
        self.live_costs.add(batch_size=len(sequences), num_rows=len(logits), seconds=forward_s)
        offset = 0
        verdicts = []
        for sequence, tree in zip(sequences, rows, strict=True):
            verdicts.append(self._verify(sequence, tree, logits[offset : offset + len(tree)]))
            offset += len(tree)
        self._commit(sequences, rows, verdicts)
        outputs = []
        for sequence, tree, verdict in zip(sequences, rows, verdicts, strict=True):
            sequence.stats.add_step(
                kept=len(tree) - 1,
                accepted=len(verdict.accepted_rows),
                batch_size=len(sequences),
                forward_s=forward_s,
            )
            outputs.append(sequence.emit(verdict.token_ids))
        elapsed = time.perf_counter() - started
        for sequence in sequences:
            sequence.stats.decode_s += elapsed
        return outputs

    def _draft(self, sequence: Sequence, batch_size: int) -> SequenceRows:
        """Rows to verify: the pending token and the candidate nodes worth their cost."""
        token_ids, parents = [sequence.pending], [-1]
        most = MAX_TREE_NODES
        if self._row_limit is not None:
            most = min(most, self._row_limit // batch_size - 1)
        depth = min(self.target.max_tree_depth, sequence.remaining_tokens - 1)
        if sequence.session is not None and most > 0 and depth > 0:
            tree = self._kept_tree(sequence, sequence.session, batch_size, most, depth)
            token_ids += tree.tokens.tolist()
            parents += (tree.parents + 1).tolist()
        return SequenceRows(
            sequence.place, sequence.committed, np.array(token_ids), np.array(parents)
        )

    def _kept_tree(
        self, sequence: Sequence, session: DraftSession, batch_size: int, most: int, depth: int
    ) -> DraftTree:
        stats = sequence.stats
        started = time.perf_counter()
        try:
            candidate = session.propose(max_nodes=MAX_TREE_NODES, max_depth=depth)
            drafted = time.perf_counter()
            kept = self.node_filter(candidate, sequence.thresholds, batch_size, most)
            tree = candidate.tree.select(kept).validate(
                vocab_size=self.target.vocab_size, max_nodes=most, max_depth=depth
            )
        except Exception:  # drafting may only cost speed; the request goes on without a tree
            logger.exception("drafting failed for request %s", sequence.request.request_id)
            self.counters["draft_errors"] += 1
            return DraftTree.empty()
        valued = time.perf_counter()
        stats.draft_s += drafted - started
        stats.valuation_s += valued - drafted
        stats.num_offered_nodes += len(candidate)
        return tree

    def _verify(self, sequence: Sequence, rows: SequenceRows, logits: torch.Tensor) -> Verdict:
        ahead = itertools.count()
        return verify(rows, lambda row: self._choose(sequence, logits[row], next(ahead)))

    def _choose(self, sequence: Sequence, logits: torch.Tensor, ahead: int) -> int:
        """The target's token `ahead` places after the last output token."""
        if sequence.greedy:
            return greedy_token(logits)
        position = len(sequence.request.prompt_ids) + len(sequence.output_ids) + ahead
        return sample_token(logits, sequence.request.params, position)

    def _commit(
        self, sequences: list[Sequence], rows: list[SequenceRows], verdicts: list[Verdict]
    ) -> None:
        """Move the accepted rows' keys and values behind the pending token's, all at once."""
        places: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for sequence, tree, verdict in zip(sequences, rows, verdicts, strict=True):
            for order, row in enumerate(verdict.accepted_rows, start=1):
                if row != order:
                    places.append(sequence.place)
                    sources.append(tree.start + row)
                    targets.append(tree.start + order)
            sequence.committed += 1 + len(verdict.accepted_rows)
        if places:
            self._cache.move(np.array(places), np.array(sources), np.array(targets))

    def _release(self, ended: list[Sequence]) -> None:
        """Free the places of ended sequences and close the gaps with the last ones."""
        for sequence in sorted(ended, key=lambda s: s.place, reverse=True):
            last = self._running.pop()
            if last is not sequence:
                self._cache.move_sequence(last.place, sequence.place, last.committed)
                self._running[sequence.place] = last
                last.place = sequence.place
            request = sequence.request
            if sequence.finish_reason in ("stop", "length") and sequence.greedy:
                self.drafter.remember(request.namespace, request.prompt_ids, sequence.output_ids)


def _neighbours(rows: list[SequenceRows]) -> list[list[SequenceRows]]:
    """Split rows, in order of place, into runs of neighbouring places."""
    groups: list[list[SequenceRows]] = []
    for member in rows:
        if groups and groups[-1][-1].sequence + 1 == member.sequence:
            groups[-1].append(member)
        else:
            groups.append([member])
    return groups


def _refuse_id(request_id: str) -> NoReturn:
    raise RequestError(f"request id {request_id!r} is in use", param="request_id")
