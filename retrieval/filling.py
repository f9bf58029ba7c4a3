"""Keeping an index in memory up to date with the store, which other processes write to as well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from retrieval.breaker import CircuitBreaker
from retrieval.codec import StoredTree
from retrieval.guard import GuardedStore
from retrieval.indexes import NamespaceIndexes
from retrieval.store import StoreError

WARM_BATCH = 64
LISTING_BATCH = 4096
"""Ids listed in one call: more would take longer than a store call may."""
FOLLOW_EVERY_S = 5.0
FOLLOW_BATCH = 256

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Spawn(Protocol):
    def __call__(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]: ...


@dataclass(slots=True)
class _Namespace:
    """followed_at: time of the last look; examined: so many of the oldest were looked up."""

    warming: asyncio.Task[bool]
    followed_at: float
    following: asyncio.Task[None] | None = None
    examined: int = 0


class IndexFiller:
    """Fills each namespace's index on first use, and lets it follow the store while it is used."""

    def __init__(
        self,
        store: GuardedStore,
        indexes: NamespaceIndexes,
        breaker: CircuitBreaker,
        *,
        fetch: Callable[[str, Sequence[int]], Awaitable[dict[int, StoredTree]]],
        spawn: Spawn,
        max_trees: int,
    ) -> None:
        """fetch reads and validates trees; spawn starts a task and keeps it alive."""
        self._store = store
        self._indexes = indexes
        self._breaker = breaker
        self._fetch = fetch
        self._spawn = spawn
        self._max_trees = max_trees
        self._namespaces: dict[str, _Namespace] = {}

    def start_warming(self, namespace: str) -> asyncio.Task[bool]:
        """The run that fills the index, True once all has been read; another after a failed one."""
        state = self._namespaces.get(namespace)
        if state is None:
            now = asyncio.get_running_loop().time()
            state = _Namespace(self._spawn(self._warm(namespace)), now)
            self._namespaces[namespace] = state
        elif state.warming.done() and not state.warming.result():
            state.warming = self._spawn(self._warm(namespace))
        return state.warming

    def keep_up(self, namespace: str) -> None:
        """Call at each lookup: fill the index, or look what has changed if it was long ago."""
        warming = self.start_warming(namespace)
        state = self._namespaces[namespace]
        now = asyncio.get_running_loop().time()
        if (
            warming.done()
            and self._breaker.state == "closed"
            and now - state.followed_at >= FOLLOW_EVERY_S
            and (state.following is None or state.following.done())
        ):
            state.followed_at = now
            state.following = self._spawn(self._follow(namespace, state))

    async def _warm(self, namespace: str) -> bool:
        try:
            if not await self._indexes.add(namespace, {}):
                return False
            ids: dict[int, None] = {}  # in order; what is written meanwhile shifts the pages
            for offset in range(0, self._max_trees, LISTING_BATCH):
                page = await self._store.tree_ids(namespace, LISTING_BATCH, offset)
                ids |= dict.fromkeys(page)
                if not page:
                    break
            return await self._index(namespace, list(ids)[: self._max_trees])
        except StoreError as error:
            _log.warning("index of namespace %s is incomplete: %s", namespace, error)
            return False

    async def _follow(self, namespace: str, state: _Namespace) -> None:
        """Index what others have written since; forget some of what has expired."""
        try:
            offset = 0
            while page := await self._store.tree_ids(namespace, FOLLOW_BATCH, offset):
                fresh = [i for i in page if not self._indexes.contains(namespace, i)]
                if not fresh or not await self._index(namespace, fresh):
                    break
                offset += len(page)
            ids = await self._indexes.oldest(namespace, FOLLOW_BATCH, state.examined)
            listed = await self._store.listed(namespace, ids)
            expired = [id_ for id_, is_there in zip(ids, listed, strict=True) if not is_there]
            await self._indexes.remove(namespace, expired)
            state.examined = state.examined + len(ids) - len(expired) if ids else 0
        except StoreError as error:
            _log.warning("index of namespace %s does not follow: %s", namespace, error)

    async def _index(self, namespace: str, newest_first: Sequence[int]) -> bool:
        """Read and index the trees that are not indexed yet; False if it was cut short."""
        # Oldest first, the order the index forgets in.
        ids = [i for i in reversed(newest_first) if not self._indexes.contains(namespace, i)]
        for start in range(0, len(ids), WARM_BATCH):
            if not self._breaker.allow():
                return False
            trees = await self._fetch(namespace, ids[start : start + WARM_BATCH])
            vectors = {id_: stored.embedding for id_, stored in trees.items()}
            if not await self._indexes.add(namespace, vectors):
                return False
        return True
