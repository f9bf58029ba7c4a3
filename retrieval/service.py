"""Retrieval of draft trees, unable to hurt the request that asks.

A lookup reads:

    1. embed the prompt                          embedding.py
    2. nearest earlier requests                  VectorIndex, in a worker thread
    3. their blobs, and the prompt's own         TreeStore, one round trip
    4. decode and validate, drop what is wrong   codec.py, in a worker thread

Whatever fails, the caller gets an outcome within its deadline, never an exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from retrieval.answers import with_answer
from retrieval.breaker import CircuitBreaker
from retrieval.codec import StoredTree
from retrieval.embedding import embed
from retrieval.filling import WARM_BATCH, IndexFiller
from retrieval.guard import GuardedStore
from retrieval.index import VectorIndex
from retrieval.indexes import NamespaceIndexes
from retrieval.namespace import tree_id
from retrieval.store import StoreError, TreeStore
from valuspec.tree import DraftTree

Outcome = Literal["hit", "miss", "timeout", "error", "open", "off"]
WriteOutcome = Literal["stored", "dropped", "error", "open"]

MAX_NAMESPACES = 64
"""A new replica reads the answers of so many: it must not take long to start."""
MAX_PENDING = 256
MAX_PENDING_WRITES = 64

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a lookup found, most similar request first.

    trees:        validated draft trees, empty unless outcome is "hit"
    similarities: cosine of the two requests' embeddings, one per tree
    outcome:      "hit"; "miss" nothing usable stored; "timeout" deadline passed; "error" the store
                  failed; "open" it is not being asked for now; "off" retrieval is switched off
    elapsed_s:    seconds the caller waited
    """

    trees: list[DraftTree]
    similarities: list[float]
    outcome: Outcome
    elapsed_s: float = 0.0

    @classmethod
    def nothing(cls, outcome: Outcome) -> Retrieved:
        return cls([], [], outcome)


class RetrievalService:
    """Finds and keeps draft trees. Use it from one event loop.

    Store calls are never cancelled: a lookup past its deadline, or whose caller went away, leaves
    its call to end by the store's own timeouts. So no connection returns to the pool with an
    unread reply, which the next call would take for its own.

    Each namespace has its own index, filled from the store on first use and by write_back. While
    it is used it follows the store: what other processes have written comes in, and what has
    expired goes. So any number of services may share one store.
    """

    def __init__(
        self,
        store: TreeStore,
        index_factory: Callable[[int], VectorIndex],
        *,
        vocab_size: int,
        max_trees: int = 1_000_000,
        breaker: CircuitBreaker | None = None,
        on_store_error: Callable[[StoreError], None] = lambda error: None,
    ) -> None:
        """index_factory makes an empty index of the given dimension; trees with token ids
        >= vocab_size are refused; max_trees bounds all indexes together, 1 KiB each; on_store_error
        learns of every failure."""
        self.breaker = breaker or CircuitBreaker()
        self._counts: Counter[str] = Counter()
        self._raw_store = store
        self._store = GuardedStore(
            store, self.breaker, self._counts, vocab_size=vocab_size, on_error=on_store_error
        )
        self._vocab_size = vocab_size
        self._tasks: set[asyncio.Task[Any]] = set()
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="retrieval")
        self._indexes = NamespaceIndexes(
            index_factory, self._workers, self._counts, max_trees=max_trees
        )
        self._filler = IndexFiller(
            self._store,
            self._indexes,
            self.breaker,
            fetch=self._fetch,
            spawn=self._spawn,
            max_trees=max_trees,
        )
        self._write_lock = asyncio.Lock()
        self._pending_writes = 0

    def counters(self) -> dict[str, int]:
        """Events since the start: `lookup.<outcome>`, `write.<outcome>`, `store_error.<kind>`,
        `tree_rejected.<reason>`, `tree_missing` (evicted or expired), `index_error`."""
        return dict(self._counts)

    def sizes(self) -> dict[str, int]:
        """Number of indexed trees by namespace."""
        return self._indexes.sizes()

    async def lookup(
        self, namespace: str, prompt_ids: Sequence[int], k: int = 16, deadline_s: float = 0.05
    ) -> Retrieved:
        """Return up to k draft trees: of this very prompt if kept, and of similar requests.

        Raises nothing but CancelledError.
        """
        started = time.perf_counter()
        if len(self._tasks) >= MAX_PENDING or not self.breaker.allow():
            retrieved = Retrieved.nothing("open")
        else:
            task = self._spawn(self._lookup(namespace, prompt_ids, k))
            done, _ = await asyncio.wait({task}, timeout=deadline_s)
            retrieved = task.result() if done else Retrieved.nothing("timeout")
        self._counts[f"lookup.{retrieved.outcome}"] += 1
        return replace(retrieved, elapsed_s=time.perf_counter() - started)

    async def write_back(
        self, namespace: str, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> WriteOutcome:
        """Merge a finished answer into the tree kept for its prompt, and index the prompt.

        Call it off the request's path. Two processes writing for one prompt at once may lose a
        count, never the tree. Raises nothing but CancelledError; a cancelled write still ends.
        """
        if self._pending_writes >= MAX_PENDING_WRITES:
            self._counts["write.dropped"] += 1
            return "dropped"
        self._pending_writes += 1
        return await asyncio.shield(
            self._spawn(self._write_back(namespace, prompt_ids, output_ids))
        )

    async def warm(self, namespace: str) -> bool:
        """Fill the namespace's index from the store; True once all of it has been read.

        Lookups start this by themselves; await it to begin with a full index. Concurrent calls
        share one run; after a failed one, the next call tries again.
        """
        return await asyncio.shield(self._filler.start_warming(namespace))

    async def recent(
        self, namespaces: Sequence[str], max_nodes: int
    ) -> list[tuple[str, DraftTree]]:
        """(namespace, tree) of the newest trees, each namespace's oldest first, for a new replica.

        At most MAX_NAMESPACES share max_nodes evenly, those in use here before others. What cannot
        be read is left out; raises nothing but CancelledError.
        """
        in_use = self._indexes.sizes()
        namespaces = sorted(namespaces, key=lambda name: name not in in_use)[:MAX_NAMESPACES]
        found: list[tuple[str, DraftTree]] = []
        for namespace in namespaces:
            trees = await self._spawn(self._newest(namespace, max_nodes // len(namespaces)))
            found += [(namespace, tree) for tree in reversed(trees)]
        return found

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """Let work under way end, at most timeout_s, then release connections and threads."""
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
            for task in late:  # nobody will use their connections again
                task.cancel()
        await self._raw_store.aclose()
        self._indexes.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _newest(self, namespace: str, max_nodes: int) -> list[DraftTree]:
        """The newest trees first, max_nodes at most in all of them."""
        trees: list[DraftTree] = []
        try:
            offset = 0
            while batch := await self._store.tree_ids(namespace, WARM_BATCH, offset):
                offset += len(batch)
                stored = await self._fetch(namespace, batch)
                for tree in (stored[id_].tree for id_ in batch if id_ in stored):
                    max_nodes -= len(tree)
                    if max_nodes < 0:
                        return trees
                    trees.append(tree)
        except StoreError as error:
            _log.warning("namespace %s is handed out incompletely: %s", namespace, error)
        return trees

    async def _lookup(self, namespace: str, prompt_ids: Sequence[int], k: int) -> Retrieved:
        try:
            return await self._retrieve(namespace, prompt_ids, k)
        except StoreError:  # counted where it happened
            return Retrieved.nothing("error")
        except Exception:  # noqa: BLE001 - a defect here must not fail the request
            _log.exception("lookup failed")
            return Retrieved.nothing("error")

    async def _retrieve(self, namespace: str, prompt_ids: Sequence[int], k: int) -> Retrieved:
        self._filler.keep_up(namespace)
        query = embed(prompt_ids)
        # The own tree is asked for even if not indexed: another replica may have written it.
        own_id = tree_id(prompt_ids)
        similar = await self._indexes.search(namespace, query, k)
        ids = [own_id, *(id_ for id_ in similar if id_ != own_id)]
        stored = (await self._fetch(namespace, ids[:k])).values()
        ranked = sorted(stored, key=lambda tree: -float(tree.embedding @ query))
        return Retrieved(
            [one.tree for one in ranked],
            [float(one.embedding @ query) for one in ranked],
            "hit" if ranked else "miss",
        )

    async def _fetch(self, namespace: str, ids: Sequence[int]) -> dict[int, StoredTree]:
        """Read and validate; forget what is missing, delete what is corrupt."""
        blobs = await self._store.fetch(namespace, ids)
        trees, rejected = await asyncio.get_running_loop().run_in_executor(
            self._workers, self._store.decode, namespace, blobs
        )
        for id_, reason in rejected.items():
            self._counts[f"tree_rejected.{reason}"] += 1
            _log.warning("stored tree %d refused: %s", id_, reason)
        missing = [i for i in ids if i not in blobs and self._indexes.contains(namespace, i)]
        self._counts["tree_missing"] += len(missing)
        await self._indexes.remove(namespace, [*missing, *rejected])
        if rejected:
            self._spawn(self._quarantine(namespace, list(rejected)))
        return trees

    async def _quarantine(self, namespace: str, ids: Sequence[int]) -> None:
        try:
            await self._store.drop(namespace, ids)
        except StoreError as error:
            _log.warning("%d corrupt trees stay until they expire: %s", len(ids), error)

    async def _write_back(
        self, namespace: str, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> WriteOutcome:
        outcome: WriteOutcome
        try:
            async with self._write_lock:  # read, merge and write belong together
                outcome = "open"
                if self.breaker.allow():
                    await self._merge(namespace, prompt_ids, output_ids)
                    outcome = "stored"
        except StoreError:  # counted where it happened
            outcome = "error"
        except (ValueError, OverflowError) as error:  # no prompt, no answer, foreign token ids
            _log.warning("answer not stored: %s", error)
            outcome = "dropped"
        except Exception:  # noqa: BLE001 - a defect here must not fail the request
            _log.exception("write-back failed")
            outcome = "error"
        finally:
            self._pending_writes -= 1
        self._counts[f"write.{outcome}"] += 1
        return outcome

    async def _merge(
        self, namespace: str, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        id_, embedding = tree_id(prompt_ids), embed(prompt_ids)
        with_answer(None, output_ids, self._vocab_size)  # nothing is read for what is refused
        kept = (await self._fetch(namespace, [id_])).get(id_)
        merged = with_answer(kept.tree if kept else None, output_ids, self._vocab_size)
        await self._store.put(namespace, id_, StoredTree(merged, embedding))
        await self._indexes.add(namespace, {id_: embedding})

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)
        return task
