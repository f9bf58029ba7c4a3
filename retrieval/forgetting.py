"""Deleting one tenant's draft trees."""

from __future__ import annotations

from retrieval.store import StoreError, TreeStore

_BATCH = 1000


async def forget_trees(store: TreeStore, namespace: str) -> int:
    """Drop every tree of a namespace and return how many there were. Raises StoreError.

    First make sure that no more are written. An index in memory forgets a tree when it next asks
    for it.
    """
    num_dropped = 0
    before: list[int] = []
    while ids := await store.tree_ids(namespace, _BATCH):
        if ids == before:
            raise StoreError("protocol", f"{len(ids)} trees are listed after being dropped")
        await store.drop(namespace, ids)
        num_dropped += len(ids)
        before = ids
    return num_dropped
