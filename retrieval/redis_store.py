"""TreeStore on Redis or Valkey, tuned so that it cannot hold up a request.

    vs:{<namespace>}:tree:<tree_id>   the blob, with a time to live
    vs:{<namespace>}:trees            sorted set of tree ids by expiry (unix seconds)

The braces keep a namespace in one cluster slot. Only trees have a time to live, so under
`maxmemory-policy volatile-lfu` only trees are evicted; the sorted set lists what to index after a
restart and forgets expired ids at each write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from retrieval.codec import MAX_BLOB_BYTES
from retrieval.store import DEFAULT_TTL_S, StoreError, StoreErrorKind

_REPLY_KINDS: dict[str, StoreErrorKind] = {
    "OOM": "full",
    "READONLY": "readonly",
    "NOAUTH": "auth",
    "WRONGPASS": "auth",
    "NOPERM": "auth",
    "LOADING": "loading",
    "MOVED": "moved",
    "MASTERDOWN": "readonly",
    "MISCONF": "readonly",
}


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
        return [_blob(reply) for reply in await _guard(pipeline.execute(raise_on_error=False))]

    async def put(self, namespace: str, tree_id: int, blob: bytes) -> None:
        now = time.time()
        pipeline = self._client().pipeline(transaction=False)
        pipeline.set(_tree_key(namespace, tree_id), blob, ex=self._ttl_s)
        pipeline.zadd(_listing_key(namespace), {str(tree_id): now + self._ttl_s})
        pipeline.zremrangebyscore(_listing_key(namespace), "-inf", now)
        await _execute(pipeline)

    async def drop(self, namespace: str, tree_ids: Sequence[int]) -> None:
        if not tree_ids:
            return
        pipeline = self._client().pipeline(transaction=False)
        pipeline.unlink(*(_tree_key(namespace, tree_id) for tree_id in tree_ids))
        pipeline.zrem(_listing_key(namespace), *map(str, tree_ids))
        await _execute(pipeline)

    async def tree_ids(self, namespace: str, limit: int) -> list[int]:
        if limit <= 0:
            return []
        client = self._client()
        reply = await _guard(
            client.zrange(
                _listing_key(namespace),
                "+inf",
                f"({time.time()}",
                desc=True,
                byscore=True,
                offset=0,
                num=limit,
            )
        )
        return [int(member) for member in reply if member.isdigit()]

    async def aclose(self) -> None:
        if self._redis is not None:
            client, self._redis = self._redis, None
            await client.aclose()

    def _client(self) -> Redis:
        if self._redis is None:
            pool = BlockingConnectionPool.from_url(
                self._url,
                max_connections=self._max_connections,
                timeout=self._read_timeout_s,
                socket_connect_timeout=self._connect_timeout_s,
                socket_timeout=self._read_timeout_s,
                # The defaults retry ten times with back-off: close to a minute for one call.
                retry=Retry(NoBackoff(), 0),
                health_check_interval=30,
                protocol=2,
            )
            self._redis = Redis.from_pool(pool)
        return self._redis


async def _guard(call: Awaitable[Any]) -> Any:
    """Await a redis-py call and turn whatever it raises into StoreError."""
    try:
        return await call
    except (RedisError, OSError) as error:
        raise StoreError(_kind(error), str(error)) from error
    except (ValueError, TypeError, AttributeError, asyncio.IncompleteReadError) as error:
        # A peer that does not speak the protocol makes the reply parser fail in its own ways.
        raise StoreError("protocol", f"{type(error).__name__}: {error}") from error


async def _execute(pipeline: Pipeline) -> None:
    """Run a pipeline; raise StoreError for the first error among its replies."""
    for reply in await _guard(pipeline.execute(raise_on_error=False)):
        if isinstance(reply, Exception):
            raise StoreError(_kind(reply), str(reply)) from reply


def _kind(error: Exception) -> StoreErrorKind:
    if isinstance(error.__cause__, RedisError):  # failed while connecting: the reason is inside
        return _kind(error.__cause__)
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return "timeout"
    # redis-py moves the code of the replies it knows from the text to status_code.
    code = getattr(error, "status_code", None) or str(error).partition(" ")[0]
    if code in _REPLY_KINDS:
        return _REPLY_KINDS[code]
    if isinstance(error, RedisConnectionError | OSError):
        return "busy" if str(error) == "No connection available." else "unreachable"
    return "protocol"


def _blob(reply: object) -> bytes | None:
    """One GETRANGE reply; raise StoreError unless it is about this key alone."""
    if isinstance(reply, bytes):
        return reply or None  # GETRANGE of a missing key is empty
    if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
        return b"\0"  # something that is no blob lies under the key: refused by the codec
    if isinstance(reply, Exception):
        raise StoreError(_kind(reply), str(reply)) from reply
    raise StoreError("protocol", f"GETRANGE answered {type(reply).__name__}")


def _tree_key(namespace: str, tree_id: int) -> str:
    return f"vs:{{{namespace}}}:tree:{tree_id}"


def _listing_key(namespace: str) -> str:
    return f"vs:{{{namespace}}}:trees"
