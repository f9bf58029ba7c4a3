"""A replica's way to stored draft trees: one lookup per request, write-back off the path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.messages import RetrievalReport
from deployments.telemetry import Telemetry
from retrieval.tenants import Owner
from valuspec.errors import InvalidTreeError
from valuspec.tree import DraftTree

logger = logging.getLogger(__name__)

#: Finished answers waiting to be stored; more are dropped and counted.
MAX_PENDING_WRITES = 256
#: After this long a lookup is given up. Nobody waits for it: it bounds what a hung retrieval
#: deployment can pile up, while the store itself answers within the lookup's deadline or not.
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class RetrievedDrafts:
    """Draft trees of similar earlier requests, pruned by the valuation deployment."""

    trees: list[DraftTree]
    outcome: str
    num_stored_nodes: int
    """Nodes before pruning."""
    valuation_s: float


class DraftStore:
    """Asks retrieval, through valuation, for a request's draft trees; stores finished answers.

    Failures of either deployment are outcomes to count, never errors of a request.
    """

    def __init__(
        self,
        retrieval: DeploymentHandle[Any],
        valuation: DeploymentHandle[Any],
        telemetry: Telemetry,
        *,
        model_fingerprint: str,
        vocab_size: int,
        k: int,
        deadline_s: float,
    ) -> None:
        self._lookup = retrieval.options(method_name="lookup")
        self._write = retrieval.options(method_name="write_back")
        self._recent = retrieval.options(method_name="recent")
        self._prune = valuation.options(method_name="prune")
        self._telemetry = telemetry
        self._model_fingerprint = model_fingerprint
        self._vocab_size = vocab_size
        self._k = k
        self._deadline_s = deadline_s
        self._pending: asyncio.Queue[tuple[Owner, Sequence[int], Sequence[int]]] = asyncio.Queue(
            MAX_PENDING_WRITES
        )
        self._writer: asyncio.Task[None] | None = None

    async def lookup(
        self, namespace: str, prompt_ids: Sequence[int], report: RetrievalReport
    ) -> list[DraftTree]:
        """Draft trees for a prompt; fills in `report`. Raises nothing but CancelledError."""
        started = time.monotonic()
        trees: list[DraftTree] = []
        report.outcome = "late"  # unless this ends before the request, which then cancels it
        try:
            # Handing the unfinished lookup to valuation spares the trees a way through here.
            found = self._lookup.remote(namespace, tuple(prompt_ids), self._k, self._deadline_s)
            pruned = self._prune.remote(found, self._model_fingerprint)
            async with asyncio.timeout(PATIENCE_S):
                drafts: RetrievedDrafts = await pruned
        except TimeoutError:
            report.outcome = "timeout"
        except Exception as error:  # noqa: BLE001 - whatever fails there, the request goes on
            logger.warning("draft lookup failed: %r", error)
            report.outcome = "error"
        else:
            trees = [tree for tree in drafts.trees if self._usable(tree)]
            report.outcome = drafts.outcome
            report.num_trees = len(trees)
            report.num_stored_nodes = drafts.num_stored_nodes
            report.num_nodes = sum(len(tree) for tree in trees)
            report.valuation_s = drafts.valuation_s
        report.latency_s = time.monotonic() - started
        self._telemetry.count("valuspec_retrieval_requests", outcome=report.outcome)
        self._telemetry.observe(
            "valuspec_retrieval_latency_seconds", report.latency_s, outcome=report.outcome
        )
        return trees

    async def recent(self, max_nodes: int) -> list[tuple[str, DraftTree]]:
        """(namespace, tree) of the newest stored answers, to begin with; none where that fails."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                found: list[tuple[str, DraftTree]] = await self._recent.remote(
                    self._model_fingerprint, max_nodes
                )
        except Exception as error:  # noqa: BLE001 - a replica starts without, only slower
            logger.warning("no stored answers to begin with: %r", error)
            return []
        usable = [(namespace, tree) for namespace, tree in found if self._usable(tree)]
        self._telemetry.count("valuspec_warmed_answers", len(usable))
        return usable

    def _usable(self, tree: DraftTree) -> bool:
        """Whether the engine may see the tree; only here is the vocabulary known."""
        try:
            tree.validate(vocab_size=self._vocab_size, max_nodes=len(tree), max_depth=len(tree))
        except InvalidTreeError as error:
            self._telemetry.count("valuspec_trees_refused")
            logger.warning("retrieved tree refused: %s", error)
            return False
        return True

    def write_back(
        self, owner: Owner, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Queue a finished greedy answer for storing; call from the event loop."""
        if self._writer is None:
            # Without a context of its own, every write would be logged under the first request.
            self._writer = asyncio.create_task(self._write_all(), context=Context())
        try:
            self._pending.put_nowait((owner, prompt_ids, output_ids))
        except asyncio.QueueFull:
            self._telemetry.count("valuspec_write_back", outcome="dropped")

    async def _write_all(self) -> None:
        while True:
            owner, prompt_ids, output_ids = await self._pending.get()
            outcome = "error"
            with contextlib.suppress(Exception):
                async with asyncio.timeout(PATIENCE_S):
                    outcome = str(await self._write.remote(owner, prompt_ids, output_ids))
            self._telemetry.count("valuspec_write_back", outcome=outcome)
