"""Documents in Redis or Valkey. Keys have no time to live, so they are never evicted under
`maxmemory-policy volatile-lfu`; each step that must be atomic is one script.

    vs:lease:<name>   fencing token of the holder, with a time to live
    vs:fence:<name>   the last token granted
"""

from __future__ import annotations

import math
from typing import Any

from redis.asyncio import Redis

from retrieval.documents import MAX_DOCUMENT_BYTES, Lease, Swapped
from retrieval.redis_client import connect, guard
from retrieval.store import StoreError

_SWAP = """
local document, fence = KEYS[1], KEYS[2]
local old, new, token = ARGV[1], ARGV[2], ARGV[3]
if token ~= '' and redis.call('GET', fence) ~= token then return 'fenced' end
if (redis.call('GET', document) or '') ~= old then return 'changed' end
redis.call('SET', document, new)
return 'done'
"""
_ACQUIRE = """
local lease, fence = KEYS[1], KEYS[2]
if redis.call('EXISTS', lease) == 1 then return 0 end
local token = redis.call('INCR', fence)
redis.call('SET', lease, token, 'PX', ARGV[1])
return token
"""
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class RedisDocuments:
    """Create it anywhere; use it from one event loop.

    Nothing is retried: after a lost reply nobody knows whether a step was done, so the caller
    reads again.
    """

    def __init__(
        self, url: str, *, connect_timeout_s: float = 1.0, read_timeout_s: float = 2.0
    ) -> None:
        self._url = url
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._redis: Redis | None = None

    async def read(self, key: str) -> bytes | None:
        # Unlike GET, GETRANGE bounds the reply. It answers a missing key with nothing.
        reply = await guard(self._client().getrange(key, 0, MAX_DOCUMENT_BYTES))
        if not isinstance(reply, bytes):
            raise StoreError("protocol", f"GETRANGE answered {type(reply).__name__}")
        return reply or None

    async def ping(self) -> None:
        """Raise StoreError unless the server answers, and lets us in."""
        await guard(self._client().ping())

    async def create(self, key: str, value: bytes) -> bool:
        return bool(await guard(self._client().set(key, value, nx=True)))

    async def swap(
        self, key: str, old: bytes | None, new: bytes, fence: Lease | None = None
    ) -> Swapped:
        keys = [key, _fence_key(fence.name) if fence else key]
        values = [old or b"", new, fence.token if fence else ""]
        match await self._run(_SWAP, keys, values):
            case b"done":
                return "done"
            case b"changed":
                return "changed"
            case b"fenced":
                return "fenced"
            case reply:
                raise StoreError("protocol", f"the swap script answered {reply!r:.40}")

    async def delete(self, key: str) -> None:
        await guard(self._client().unlink(key))

    async def add_members(self, key: str, *members: str) -> None:
        if members:
            await guard(self._client().sadd(key, *members))

    async def remove_members(self, key: str, *members: str) -> None:
        if members:
            await guard(self._client().srem(key, *members))

    async def members(self, key: str) -> set[str]:
        reply = await guard(self._client().smembers(key))
        try:
            return {member.decode() for member in reply}
        except (TypeError, AttributeError, UnicodeDecodeError) as error:
            raise StoreError("protocol", f"SMEMBERS answered {reply!r:.40}") from error

    async def acquire(self, name: str, ttl_s: float) -> Lease | None:
        token = await self._run(_ACQUIRE, [_lease_key(name), _fence_key(name)], [_ms(ttl_s)])
        if not isinstance(token, int):
            raise StoreError("protocol", f"the lease script answered {token!r:.40}")
        return Lease(name, token) if token else None

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        return bool(await self._run(_RENEW, [_lease_key(lease.name)], [lease.token, _ms(ttl_s)]))

    async def release(self, lease: Lease) -> None:
        await self._run(_RELEASE, [_lease_key(lease.name)], [lease.token])

    async def aclose(self) -> None:
        if self._redis is not None:
            client, self._redis = self._redis, None
            await client.aclose()

    async def _run(self, script: str, keys: list[str], values: list[Any]) -> Any:
        return await guard(self._client().eval(script, len(keys), *keys, *values))

    def _client(self) -> Redis:
        if self._redis is None:
            self._redis = connect(
                self._url,
                connect_timeout_s=self._connect_timeout_s,
                read_timeout_s=self._read_timeout_s,
                max_connections=4,
            )
        return self._redis


def _ms(seconds: float) -> int:
    if not 0 < seconds < math.inf:
        raise ValueError(f"a time to live of {seconds} s; more than 0 expected")
    return max(1, round(1000 * seconds))


def _lease_key(name: str) -> str:
    return f"vs:lease:{name}"


def _fence_key(name: str) -> str:
    return f"vs:fence:{name}"
