"""The valuation deployment: the pure filter of `valuspec.valuation`, as a service.

It prunes the draft trees retrieved for a request before they reach the replica, and it values
trees of other frameworks. Inside a replica the same function runs in process, every step: a call
like this one costs more than valuing the tree.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from ray.serve.handle import DeploymentHandle

from deployments.drafts import RetrievedDrafts
from deployments.messages import Refusal
from deployments.replica_thresholds import ReplicaThresholds
from deployments.schemas import FilterRequest
from deployments.telemetry import Telemetry
from retrieval import Retrieved
from valuspec import valuation
from valuspec.errors import InvalidTreeError
from valuspec.evidence import CandidateTree, Evidence
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

_MAX_TOKEN_ID = 2**31 - 1


class Valuation:
    """Stateless but for the threshold sets in use, one per model that it has pruned trees for."""

    def __init__(self, retrieval: DeploymentHandle[Any] | None = None) -> None:
        self._retrieval = retrieval
        self._telemetry = Telemetry()
        self._user_config: dict[str, Any] = {}
        self._models: dict[str, ReplicaThresholds] = {}
        self._first_polls: list[asyncio.Task[None]] = []  # the loop itself keeps weak references

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: which threshold sets to use."""
        self._user_config = user_config
        for thresholds in self._models.values():
            thresholds.apply(user_config)
            await thresholds.follow()

    async def prune(self, retrieved: Retrieved, model_fingerprint: str) -> RetrievedDrafts:
        """Drop the nodes of stored trees that no step could want to verify."""
        started = time.perf_counter()
        thresholds = self._thresholds_of(model_fingerprint)
        trees = []
        for tree, similarity in zip(retrieved.trees, retrieved.similarities, strict=True):
            kept = valuation.prune_retrieved(tree, thresholds, similarity)
            if len(kept):
                trees.append(tree.select(kept))
        return RetrievedDrafts(
            trees=trees,
            outcome=retrieved.outcome,
            num_stored_nodes=sum(len(tree) for tree in retrieved.trees),
            valuation_s=time.perf_counter() - started,
        )

    async def filter(self, body: FilterRequest, model_fingerprint: str) -> dict[str, Any] | Refusal:
        """Indices of the nodes to verify, and the value of every node."""
        tree = DraftTree.from_lists(body.tokens, body.parents, body.counts)
        try:
            tree.validate(vocab_size=_MAX_TOKEN_ID, max_nodes=len(tree), max_depth=len(tree))
        except InvalidTreeError as error:
            return Refusal(status=400, message=f"not a draft tree: {error}", param="parents")
        if body.probabilities is None:
            evidence = Evidence.of_tree(tree)
        elif len(body.probabilities) == len(tree):
            evidence = Evidence.of_draft_model(tree, np.asarray(body.probabilities, np.float32))
        else:
            message = f"{len(body.probabilities)} probabilities for {len(tree)} nodes"
            return Refusal(status=400, message=message, param="probabilities")
        candidate = CandidateTree(tree, evidence)
        thresholds = self._thresholds_of(model_fingerprint)
        kept = valuation.keep(
            candidate, thresholds, batch_size=body.batch_size, max_nodes=body.max_nodes
        )
        return {
            "kept": kept.tolist(),
            "values": valuation.values(candidate, thresholds).tolist(),
            "threshold_version": thresholds.version,
        }

    def _thresholds_of(self, model_fingerprint: str) -> ThresholdSet:
        """The set in use for a model, which is followed from the first time on."""
        thresholds = self._models.get(model_fingerprint)
        if thresholds is None:
            thresholds = ReplicaThresholds(model_fingerprint, self._retrieval, self._telemetry)
            thresholds.apply(self._user_config)
            self._models[model_fingerprint] = thresholds
            # No request waits for the store; the first may be valued by the set that is shipped.
            self._first_polls.append(asyncio.create_task(thresholds.follow()))
        return thresholds.current
