"""TreeStore on Redis or Valkey, tuned so that it cannot hold up a request.

    vs:{<namespace>}:tree:<tree_id>   the blob, with a time to live
    vs:{<namespace>}:trees            sorted set of tree ids by expiry (unix seconds)

The braces keep a namespace in one cluster slot. Only trees have a time to live, so under
`maxmemory-policy volatile-lfu` only trees are evicted; the sorted set lists what to index after a
restart and forgets expired ids at each write.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from retrieval.codec import MAX_BLOB_BYTES
from retrieval.redis_client import connect, error_kind, execute, guard
from retrieval.store import DEFAULT_TTL_S, StoreError


class RedisStore:
    """Trees in Redis. Create it anywhere; use it from one event loop.

    An asyncio client belongs to the loop it first ran in, so it is created by the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int = DEFAULT_TTL_S,
        connect_timeout_s: float = 0.1,
        read_timeout_s: float = 0.05,
        max_connections: int = 16,
    ) -> None:
        self._url = url
        self._ttl_s = ttl_s
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._max_connections = max_connections
        self._redis: Redis | None = None

    async def fetch(self, namespace: str, tree_ids: Sequence[int]) -> list[bytes | None]:
        if not tree_ids:
            return []
        pipeline = self._client().pipeline(transaction=False)
        for tree_id in tree_ids:
            # Unlike GET, GETRANGE bounds the reply: one byte too many tells a giant value.
            pipeline.getrange(_tree_key(namespace, tree_id), 0, MAX_BLOB_BYTES)
        return [_blob(reply) for reply in await guard(pipeline.execute(raise_on_error=False))]

    async def put(self, namespace: str, tree_id: int, blob: bytes) -> None:
        await self.put_many(namespace, {tree_id: blob})

    async def put_many(self, namespace: str, blobs: Mapping[int, bytes]) -> None:
        if not blobs:
            return
        now = time.time()
        pipeline = self._client().pipeline(transaction=False)
        for tree_id, blob in blobs.items():
            pipeline.set(_tree_key(namespace, tree_id), blob, ex=self._ttl_s)
        pipeline.zadd(_listing_key(namespace), {str(id_): now + self._ttl_s for id_ in blobs})
        pipeline.zremrangebyscore(_listing_key(namespace), "-inf", now)
        await execute(pipeline)

    async def drop(self, namespace: str, tree_ids: Sequence[int]) -> None:
        if not tree_ids:
            return
        pipeline = self._client().pipeline(transaction=False)
        pipeline.unlink(*(_tree_key(namespace, tree_id) for tree_id in tree_ids))
        pipeline.zrem(_listing_key(namespace), *map(str, tree_ids))
        await execute(pipeline)

    async def tree_ids(self, namespace: str, limit: int, offset: int = 0) -> list[int]:
        if limit <= 0:
            return []
        # By rank, which finds an offset without counting up to it.
        call = self._client().zrange(
            _listing_key(namespace), offset, offset + limit - 1, desc=True, withscores=True
        )
        now = time.time()
        return [int(member) for member, expiry in await guard(call) if _lives(member, expiry, now)]

    async def count(self, namespace: str) -> int:
        return int(await guard(self._client().zcard(_listing_key(namespace))))

    async def listed(self, namespace: str, tree_ids: Sequence[int]) -> list[bool]:
        if not tree_ids:
            return []
        call = self._client().zmscore(_listing_key(namespace), [str(id_) for id_ in tree_ids])
        now = time.time()
        return [score is not None and score > now for score in await guard(call)]

    async def aclose(self) -> None:
        if self._redis is not None:
            client, self._redis = self._redis, None
            await client.aclose()

    def _client(self) -> Redis:
        if self._redis is None:
            self._redis = connect(
                self._url,
                connect_timeout_s=self._connect_timeout_s,
                read_timeout_s=self._read_timeout_s,
                max_connections=self._max_connections,
            )
        return self._redis


def _lives(member: bytes, expiry: float, now: float) -> bool:
    return member.isdigit() and expiry > now


def _blob(reply: object) -> bytes | None:
    """One GETRANGE reply; raise StoreError unless it is about this key alone."""
    if isinstance(reply, bytes):
        return reply or None  # GETRANGE of a missing key is empty
    if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
        return b"\0"  # something that is no blob lies under the key: refused by the codec
    if isinstance(reply, Exception):
        raise StoreError(error_kind(reply), str(reply)) from reply
    raise StoreError("protocol", f"GETRANGE answered {type(reply).__name__}")


def _tree_key(namespace: str, tree_id: int) -> str:
    return f"vs:{{{namespace}}}:tree:{tree_id}"


def _listing_key(namespace: str) -> str:
    return f"vs:{{{namespace}}}:trees"
