"""A Redis client that fails fast, and what its failures are called here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from retrieval.store import StoreError, StoreErrorKind

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


def connect(
    url: str, *, connect_timeout_s: float, read_timeout_s: float, max_connections: int
) -> Redis:
    """A client for one event loop, the one of its first call. Connects on demand."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=read_timeout_s,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=read_timeout_s,
        # The defaults retry ten times with back-off: close to a minute for one call.
        retry=Retry(NoBackoff(), 0),
        health_check_interval=30,
        protocol=2,
    )
    return Redis.from_pool(pool)


async def guard(call: Awaitable[Any]) -> Any:
    """Await a redis-py call and turn whatever it raises into StoreError."""
    try:
        return await call
    except (RedisError, OSError) as error:
        raise StoreError(error_kind(error), str(error)) from error
    except (ValueError, TypeError, AttributeError, asyncio.IncompleteReadError) as error:
        # A peer that does not speak the protocol makes the reply parser fail in its own ways.
        raise StoreError("protocol", f"{type(error).__name__}: {error}") from error


async def execute(pipeline: Pipeline) -> None:
    """Run a pipeline; raise StoreError for the first error among its replies."""
    for reply in await guard(pipeline.execute(raise_on_error=False)):
        if isinstance(reply, Exception):
            raise StoreError(error_kind(reply), str(reply)) from reply


def error_kind(error: Exception) -> StoreErrorKind:
    if isinstance(error.__cause__, RedisError):  # failed while connecting: the reason is inside
        return error_kind(error.__cause__)
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return "timeout"
    # redis-py moves the code of the replies it knows from the text to status_code.
    code = getattr(error, "status_code", None) or str(error).partition(" ")[0]
    if code in _REPLY_KINDS:
        return _REPLY_KINDS[code]
    if isinstance(error, AuthenticationError):  # a password where the server wants none, say
        return "auth"
    if isinstance(error, RedisConnectionError | OSError):
        return "busy" if str(error) == "No connection available." else "unreachable"
    return "protocol"
