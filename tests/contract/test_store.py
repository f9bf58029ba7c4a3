"""What every TreeStore promises; the Redis one against a real server."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from retrieval.codec import MAX_BLOB_BYTES
from retrieval.embedded import EmbeddedValkey
from retrieval.redis_store import RedisStore
from retrieval.store import InMemoryStore, StoreError, TreeStore
from tests.support.servers import admin, answering

NS = "aabbccdd"
Scenario = Callable[[TreeStore], Awaitable[None]]


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario on an empty store, in an event loop of its own."""
    if request.param == "memory":
        return lambda scenario: asyncio.run(scenario(InMemoryStore()))
    valkey: EmbeddedValkey = request.getfixturevalue("valkey")
    with admin(valkey) as client:
        client.flushall()

    async def main(scenario: Scenario) -> None:
        async with redis_store(valkey.url) as store:
            await scenario(store)

    return lambda scenario: asyncio.run(main(scenario))


@asynccontextmanager
async def redis_store(url: str, **options) -> AsyncIterator[RedisStore]:
    # Contracts are about what, not when: a busy machine must not time out here.
    patient = {"connect_timeout_s": 5.0, "read_timeout_s": 5.0}
    store = RedisStore(url, **(patient | options))
    try:
        yield store
    finally:
        await store.aclose()


def test_blobs_come_back_in_the_order_asked_for(run) -> None:
    async def scenario(store: TreeStore) -> None:
        blobs = {n: os.urandom(100) for n in (1, 2, 2**63 - 1)}
        for tree_id, blob in blobs.items():
            await store.put(NS, tree_id, blob)
        got = await store.fetch(NS, [2, 99, 2**63 - 1, 2, 1])
        assert got == [blobs[2], None, blobs[2**63 - 1], blobs[2], blobs[1]]
        assert await store.fetch(NS, []) == []

    run(scenario)


def test_put_replaces(run) -> None:
    async def scenario(store: TreeStore) -> None:
        await store.put(NS, 1, b"a long old value")
        await store.put(NS, 1, b"new")
        assert await store.fetch(NS, [1]) == [b"new"]
        assert await store.tree_ids(NS, 10) == [1]

    run(scenario)


def test_namespaces_do_not_meet(run) -> None:
    async def scenario(store: TreeStore) -> None:
        await store.put(NS, 1, b"mine")
        assert await store.fetch("other", [1]) == [None]
        assert await store.tree_ids("other", 10) == []
        await store.drop("other", [1])
        assert await store.fetch(NS, [1]) == [b"mine"]

    run(scenario)


def test_dropped_trees_are_gone(run) -> None:
    async def scenario(store: TreeStore) -> None:
        for tree_id in (1, 2, 3):
            await store.put(NS, tree_id, b"blob")
        await store.drop(NS, [1, 3, 77])
        await store.drop(NS, [])
        assert await store.fetch(NS, [1, 2, 3]) == [None, b"blob", None]
        assert await store.tree_ids(NS, 10) == [2]

    run(scenario)


def test_tree_ids_are_newest_first(run) -> None:
    async def scenario(store: TreeStore) -> None:
        for tree_id in (5, 30, 1, 5):
            await store.put(NS, tree_id, b"blob")
        assert await store.tree_ids(NS, 10) == [5, 1, 30]
        assert await store.tree_ids(NS, 2) == [5, 1]
        assert await store.tree_ids(NS, 0) == []

    run(scenario)


def test_a_giant_value_comes_cut(run) -> None:
    async def scenario(store: TreeStore) -> None:
        await store.put(NS, 1, bytes(3 * MAX_BLOB_BYTES))
        [blob] = await store.fetch(NS, [1])
        assert blob is not None
        assert len(blob) == MAX_BLOB_BYTES + 1

    run(scenario)


def test_memory_forgets_after_the_time_to_live() -> None:
    now = [0.0]

    async def scenario() -> None:
        store = InMemoryStore(ttl_s=10, clock=lambda: now[0])
        await store.put(NS, 1, b"old")
        now[0] = 6
        await store.put(NS, 2, b"new")
        now[0] = 10
        assert await store.fetch(NS, [1, 2]) == [None, b"new"]
        assert await store.tree_ids(NS, 10) == [2]

    asyncio.run(scenario())


def test_redis_forgets_after_the_time_to_live(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with redis_store(valkey.url, ttl_s=1000) as store:
            await store.put(NS, 1, b"blob")
            with admin(valkey) as client:
                assert 990 < client.ttl(f"vs:{{{NS}}}:tree:1") <= 1000
                assert client.ttl(f"vs:{{{NS}}}:trees") == -1  # only trees may be evicted
                client.zadd(f"vs:{{{NS}}}:trees", {"77": 1.0})  # expired long ago
                assert 77 not in await store.tree_ids(NS, 10)
                await store.put(NS, 2, b"blob")
                assert client.zscore(f"vs:{{{NS}}}:trees", "77") is None

    asyncio.run(scenario())


def test_a_key_of_another_type_is_that_keys_problem_alone(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with redis_store(valkey.url) as store:
            await store.put(NS, 1, b"blob")
            with admin(valkey) as client:
                client.delete(f"vs:{{{NS}}}:tree:2")
                client.rpush(f"vs:{{{NS}}}:tree:2", "not a string")
            wrong, right = await store.fetch(NS, [2, 1])
            assert wrong is not None
            assert wrong != right == b"blob"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("setting", "kind", "reads"),
    [
        ({"maxmemory": "1", "maxmemory-policy": "noeviction"}, "full", True),
        ({"requirepass": "secret"}, "auth", False),
        ({"min-replicas-to-write": "3"}, "protocol", True),  # NOREPLICAS: any other refusal
    ],
    ids=["full", "auth", "other"],
)
def test_refusals_of_a_real_server(valkey: EmbeddedValkey, setting, kind, reads) -> None:
    async def scenario() -> None:
        async with redis_store(valkey.url) as store:
            with pytest.raises(StoreError) as caught:
                await store.put(NS, 2, b"blob")
            assert caught.value.kind == kind
            if reads:
                assert await store.fetch(NS, [1]) == [b"blob"]
            else:
                with pytest.raises(StoreError) as caught:
                    await store.fetch(NS, [1])
                assert caught.value.kind == kind

    with admin(valkey) as client:
        client.flushall()
        client.set(f"vs:{{{NS}}}:tree:1", b"blob")
        before = {name: client.config_get(name)[name] for name in setting}
        try:
            for name, value in setting.items():
                client.config_set(name, value)
            asyncio.run(scenario())
        finally:
            for name, value in before.items():
                client.config_set(name, value)


@pytest.mark.parametrize(
    ("requirepass", "given"),
    [("secret", ""), ("secret", ":wrong@"), ("secret", "nobody:secret@"), ("", ":needless@")],
    ids=["NOAUTH", "WRONGPASS", "unknown user", "password where none is wanted"],
)
def test_a_refused_password_is_told_from_a_lost_server(valkey, requirepass, given) -> None:
    async def scenario() -> None:
        url = valkey.url.replace("unix://", f"unix://{given}")
        async with redis_store(url) as store:
            for call in (store.fetch(NS, [1]), store.put(NS, 1, b"blob"), store.count(NS)):
                with pytest.raises(StoreError) as caught:
                    await call
                assert caught.value.kind == "auth", caught.value
                assert "secret" not in str(caught.value)

    with admin(valkey) as client:
        client.config_set("requirepass", requirepass)
        try:
            asyncio.run(scenario())
        finally:
            client.config_set("requirepass", "")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "loading"),
        (b"-NOAUTH Authentication required.\r\n", "auth"),
        (b"-READONLY You can't write against a read only replica.\r\n", "readonly"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "moved"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "readonly"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", None),
        (b"\x00\xff\x17\x80" * 50 + b"\r\n", None),
        (b"$-17\r\n", None),
        (b"", "timeout"),
    ],
    ids=lambda value: value[:12].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_whatever_a_server_answers_only_store_errors_come_out(reply: bytes, kind) -> None:
    async def scenario() -> None:
        async with answering(reply) as url, redis_store(url, read_timeout_s=0.2) as store:
            for call in (
                lambda: store.fetch(NS, [1]),
                lambda: store.put(NS, 1, b"blob"),
                lambda: store.drop(NS, [1]),
                lambda: store.tree_ids(NS, 5),
            ):
                with pytest.raises(StoreError) as caught:
                    await call()
                assert kind is None or caught.value.kind == kind

    asyncio.run(scenario())


def test_a_number_is_no_blob() -> None:
    async def scenario() -> None:
        async with answering(b":5\r\n") as url, redis_store(url) as store:
            with pytest.raises(StoreError):
                await store.fetch(NS, [1])

    asyncio.run(scenario())


def test_nobody_listens() -> None:
    async def scenario() -> None:
        async with redis_store("redis://127.0.0.1:1") as store:
            with pytest.raises(StoreError) as caught:
                await store.fetch(NS, [1])
            assert caught.value.kind == "unreachable"

    asyncio.run(scenario())


def test_pages_of_ids_and_which_are_listed(run) -> None:
    async def scenario(store: TreeStore) -> None:
        for tree_id in range(10):
            await store.put(NS, tree_id, b"blob")
        await store.drop(NS, [4])
        pages = [await store.tree_ids(NS, 4, offset) for offset in (0, 4, 8, 12)]
        assert pages == [[9, 8, 7, 6], [5, 3, 2, 1], [0], []]
        assert await store.listed(NS, [3, 4, 99]) == [True, False, False]
        assert await store.listed("other", [3]) == [False]
        assert await store.listed(NS, []) == []
        assert (await store.count(NS), await store.count("other")) == (9, 0)
        await store.put_many(NS, {4: b"four", 20: b"twenty"})
        await store.put_many(NS, {})
        assert await store.fetch(NS, [4, 20]) == [b"four", b"twenty"]
        assert await store.count(NS) == 11

    run(scenario)
