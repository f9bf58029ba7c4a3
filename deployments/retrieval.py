"""The retrieval deployment: holds the FAISS index and talks to Redis; nobody else does.

So it also hands published threshold sets to the replicas.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from deployments.publishing import Polled, ReplicaReport, ThresholdDesk
from deployments.settings import AppArgs
from deployments.store_errors import StoreErrors
from deployments.telemetry import Telemetry
from retrieval import RetrievalService, Retrieved
from retrieval.locations import valkey_folder
from retrieval.store import StoreError
from retrieval.tenants import Owner, TenantRegistry
from retrieval.threshold_store import ThresholdStore
from valuspec.tree import DraftTree

logger = logging.getLogger(__name__)

#: Retrieval does not know the model. Blobs are checksummed and named by tokenizer, and the replica
#: checks ids against its vocabulary.
_ANY_VOCAB_SIZE = 2**31 - 1


def configured_store(args: AppArgs) -> str | None:
    """URL of the store that is not ours. Raises ValueError where several replicas have none."""
    url = args.redis_url or os.environ.get("REDIS_URL")
    if not url and args.num_retrieval_replicas > 1:
        raise ValueError(
            f"{args.num_retrieval_replicas} retrieval replicas need one store: set redis_url or "
            "REDIS_URL"
        )
    return url


class Retrieval:
    """Draft trees of earlier requests, kept at `redis_url`, REDIS_URL or in a Valkey of its own."""

    def __init__(self, args: AppArgs) -> None:
        # faiss and redis are loaded by this deployment only.
        from retrieval.embedded import EmbeddedValkey
        from retrieval.faiss_index import FaissIndex
        from retrieval.redis_documents import RedisDocuments
        from retrieval.redis_store import RedisStore

        url = configured_store(args)
        self._server = None
        if not url:
            folder = Path(args.valkey_dir) if args.valkey_dir else valkey_folder()
            self._server = EmbeddedValkey(folder).start()
            url = self._server.url
        self._store_failed = StoreErrors(Telemetry())
        self._service = RetrievalService(
            RedisStore(url),
            FaissIndex,
            on_store_error=self._store_failed,
            vocab_size=_ANY_VOCAB_SIZE,
            max_trees=args.max_indexed_trees,
        )
        self._thresholds = ThresholdDesk(ThresholdStore.at(url), on_error=self._store_failed)
        self._documents = RedisDocuments(url)
        self._tenants = TenantRegistry(self._documents)

    async def lookup(
        self, namespace: str, prompt_ids: tuple[int, ...], k: int, deadline_s: float
    ) -> Retrieved:
        return await self._service.lookup(namespace, prompt_ids, k, deadline_s)

    async def write_back(
        self, owner: Owner, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]
    ) -> str:
        """Store a finished greedy answer; return what became of it."""
        try:
            await self._tenants.register(owner)
        except StoreError as error:  # nothing is stored that could not be found again
            self._store_failed(error)
            logger.warning("answer not stored, its owner cannot be noted: %s", error)
            return "error"
        return await self._service.write_back(owner.namespace, prompt_ids, output_ids)

    async def recent(self, model: str, max_nodes: int) -> list[tuple[str, DraftTree]]:
        """What a new replica of a model should know: (namespace, tree) of the newest answers."""
        try:
            owners = await self._tenants.owners()
        except StoreError as error:
            self._store_failed(error)
            logger.warning("a replica starts without stored answers: %s", error)
            return []
        namespaces = [owner.namespace for owner in owners if owner.model_fingerprint == model]
        return await self._service.recent(namespaces, max_nodes)

    async def poll_thresholds(self, report: ReplicaReport) -> Polled:
        """Which threshold set is in force for the reporting replica's model."""
        return await self._thresholds.poll(report)

    async def get_thresholds(self, version: str) -> str | None:
        """The text of a published threshold set."""
        return await self._thresholds.get(version)

    async def threshold_replicas(self, model: str) -> list[ReplicaReport]:
        """Which version each replica of the model said it uses."""
        return self._thresholds.replicas(model)

    async def stats(self) -> dict[str, Any]:
        return {"counters": self._service.counters(), "num_trees": self._service.sizes()}

    async def __del__(self) -> None:
        await self._service.aclose()
        await self._thresholds.aclose()
        await self._documents.aclose()
        if self._server is not None:
            self._server.stop()
