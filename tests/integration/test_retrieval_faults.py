"""Whatever happens to the store or the index, a lookup costs its deadline at most and raises
nothing. All against a real Valkey process that is killed, stopped, filled or made to lie."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.breaker import CircuitBreaker
from retrieval.codec import MAX_BLOB_BYTES, StoredTree, encode
from retrieval.embedded import EmbeddedValkey
from retrieval.faiss_index import FaissIndex
from retrieval.index import InMemoryIndex, Neighbours
from retrieval.namespace import tree_id
from retrieval.redis_store import RedisStore
from retrieval.service import MAX_PENDING_WRITES, RetrievalService
from retrieval.store import InMemoryStore
from tests.support.retrieving import (
    LATE_S,
    NS,
    PATIENCE_S,
    VOCAB,
    answer,
    eventually,
    eventually_hit,
    fill,
    look,
    look_briefly,
    patient_service,
    prompt,
    quick_breaker,
    service,
    store_answers,
    tree_key,
)
from tests.support.servers import admin, answering, delayed, stopped
from valuspec.tree import DraftTree


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


# -- the store fails


@pytest.mark.fault(1)
def test_killed_in_mid_use(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        await fill(valkey, range(50))
        async with service(valkey.url) as made:
            await eventually_hit(made)
            lookups = [asyncio.create_task(look_briefly(made, n)) for n in range(50)]
            await asyncio.sleep(0)  # they are under way
            os.kill(valkey.pid, signal.SIGKILL)
            outcomes = {found.outcome for found in await asyncio.gather(*lookups)}
            assert outcomes <= {"hit", "miss", "timeout", "error", "open"}
            for n in range(10):
                assert (await look_briefly(made, n)).outcome in {"error", "open"}
            assert made.breaker.state == "open"
            assert await made.write_back(NS, prompt(0), answer(0)) == "open"
            assert made.counters()["store_error.unreachable"] >= 3
            assert made.counters()["write.open"] == 1

    asyncio.run(scenario())


@pytest.mark.fault(2)
def test_a_hung_server_costs_a_deadline_then_nothing(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        breaker = CircuitBreaker(failure_threshold=3, cooldown_s=60)
        await fill(valkey, range(10))
        async with service(valkey.url, breaker=breaker) as made:
            await eventually_hit(made)
            with stopped(valkey):
                for n in range(10):
                    found = await look_briefly(made, n)
                    assert found.outcome in {"timeout", "error", "open"}
                await eventually(lambda: made.breaker.state == "open")
                asked = made.counters()["store_error.timeout"]
                started = time.perf_counter()
                for n in range(100):
                    assert (await look_briefly(made, n)).outcome == "open"
                assert time.perf_counter() - started < LATE_S  # the server is not asked at all
                assert made.counters()["store_error.timeout"] == asked

    asyncio.run(scenario())


@pytest.mark.fault(2, 3)
def test_recovers_through_a_half_open_probe(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        await fill(valkey, range(10))
        async with service(valkey.url, breaker=quick_breaker()) as made:
            await eventually_hit(made)
            with stopped(valkey):
                while made.breaker.state == "closed":
                    await look_briefly(made, 1)
                await eventually(lambda: made.breaker.state == "half_open")
                failed = made.counters()["store_error.timeout"]
                await look_briefly(made, 1)  # the probe
                assert made.breaker.state == "open"
                await eventually(lambda: made.counters()["store_error.timeout"] > failed)
                await eventually(lambda: made.breaker.state == "half_open")
            await eventually_hit(made)
            assert made.breaker.state == "closed"

    asyncio.run(scenario())


@pytest.mark.fault(3, 6)
def test_a_restart_without_data_is_a_miss_not_an_error(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await store_answers(made, range(10))
            with admin(valkey) as client:
                client.flushall()
            assert (await look(made, 1)).outcome == "miss"
            assert made.counters()["tree_missing"] == 10
            assert made.sizes() == {NS: 0}
            await store_answers(made, [1])
            assert (await look(made, 1)).outcome == "hit"
            assert made.sizes() == {NS: 1}

    asyncio.run(scenario())


@pytest.mark.fault(3)
def test_a_server_back_with_its_data_is_used_again(tmp_path: Path) -> None:
    """Same folder, new process: connections of before are dead, the trees are not."""

    async def scenario() -> None:
        with EmbeddedValkey(tmp_path) as first:
            await fill(first, range(5))
            async with service(first.url, breaker=quick_breaker()) as made:
                await eventually_hit(made)
                first.stop()
                while made.breaker.state == "closed":
                    assert (await look_briefly(made, 1)).outcome != "hit"
                with EmbeddedValkey(tmp_path):
                    await eventually_hit(made)

    asyncio.run(scenario())


@pytest.mark.fault(4)
def test_a_server_that_wants_a_password(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        with admin(valkey) as client:
            client.config_set("requirepass", "secret")
            async with patient_service(valkey.url) as made:
                assert await made.write_back(NS, prompt(2), answer(2)) == "error"
                assert (await look(made, 1)).outcome == "error"
                assert made.counters()["store_error.auth"] >= 2

    asyncio.run(scenario())


@pytest.mark.fault(4)
def test_a_full_store_does_not_stop_reading(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await store_answers(made, [1])
            with admin(valkey) as client:
                client.config_set("maxmemory-policy", "noeviction")
                client.config_set("maxmemory", "1")
            for n in range(10):
                assert await made.write_back(NS, prompt(n + 2), answer(n)) == "error"
            assert made.breaker.state == "closed"
            assert (await look(made, 1)).outcome == "hit"
            assert made.counters()["store_error.full"] == 10

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "reply",
    [b"", b"-LOADING loading\r\n", b"\x00\x01\xfe\r\n", b"$3\r\nabc\r\n", b"-MOVED 1 x:1\r\n"],
    ids=["silent", "loading", "garbage", "wrong value", "moved"],
)
@pytest.mark.fault(4)
def test_servers_that_answer_nonsense(reply: bytes) -> None:
    async def scenario() -> None:
        async with answering(reply) as url, service(url) as made:
            for n in range(8):
                assert (await look_briefly(made, n)).outcome in {"timeout", "error", "open", "miss"}
                assert await made.write_back(NS, prompt(n), answer(n)) != "stored"

    asyncio.run(scenario())


@pytest.mark.fault(5)
def test_a_slow_server_is_abandoned_at_the_deadline(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        await fill(valkey, range(5))
        async with delayed(valkey, 0.5) as url, service(url) as made:
            outcomes = [(await look_briefly(made, n)).outcome for n in range(5)]
            assert "hit" not in outcomes
            await eventually(lambda: made.breaker.state == "open")

    asyncio.run(scenario())


# -- what is stored is wrong


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"short", "length"),
        (os.urandom(500), "magic"),
        (bytes(MAX_BLOB_BYTES + 1), "length"),
        (bytes(64 << 20), "length"),
        (None, "length"),  # not even a string
    ],
    ids=["short", "random", "one byte too long", "64 MiB", "list"],
)
@pytest.mark.fault(7, 9)
def test_foreign_values_are_refused_and_deleted(valkey: EmbeddedValkey, value, reason) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await store_answers(made, range(4))
            assert await made.warm(NS)  # or it would meet the value too, and count it
            with admin(valkey) as client:
                client.delete(tree_key(2))
                if value is None:
                    client.rpush(tree_key(2), "x")
                else:
                    client.set(tree_key(2), value)
                found = await look(made, 1)
                assert found.outcome == "hit"
                assert len(found.trees) == 3
                assert made.counters()[f"tree_rejected.{reason}"] == 1
                assert made.sizes() == {NS: 3}
                await eventually(lambda: not client.exists(tree_key(2)))
            await look(made, 1)
            assert made.counters()[f"tree_rejected.{reason}"] == 1  # once and for all
            await store_answers(made, [2])
            assert (await look(made, 2)).trees[0].tokens.tolist() == answer(2)

    asyncio.run(scenario())


@pytest.mark.fault(7)
def test_damaged_blobs_never_reach_a_request(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        rng = random.Random(0)
        async with patient_service(valkey.url) as made:
            assert await made.warm(NS)  # or it would meet a blob too, and count it
            with admin(valkey) as client:
                for _ in range(40):
                    await made.write_back(NS, prompt(0), answer(0))
                    blob = bytearray(client.get(tree_key(0)))
                    blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
                    client.set(tree_key(0), bytes(blob))
                    assert (await look(made, 0)).outcome == "miss"
                    await eventually(lambda: not client.exists(tree_key(0)))
            counts = made.counters()
            assert sum(n for name, n in counts.items() if name.startswith("tree_rejected")) == 40

    asyncio.run(scenario())


@pytest.mark.fault(13)
def test_an_embedding_of_another_size_is_refused(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        id_ = tree_id(prompt(0))
        stored = StoredTree(DraftTree.from_paths([[1]]), np.ones(3, np.float32))
        with admin(valkey) as client:
            client.set(tree_key(0), encode(stored, namespace=NS, tree_id=id_))
            client.zadd(f"vs:{{{NS}}}:trees", {str(id_): time.time() + 100, "rubbish": 2e10})
        async with patient_service(valkey.url) as made:
            assert await made.warm(NS)
            assert made.counters()["tree_rejected.structure"] == 1
            assert made.sizes() == {NS: 0}

    asyncio.run(scenario())


# -- the index fails


class BrokenIndex(InMemoryIndex):
    """Fails like a library in trouble."""

    def search(self, query: np.ndarray, k: int) -> Neighbours:
        raise RuntimeError("index is broken")


def broken_factory(dim: int) -> InMemoryIndex:
    raise ImportError("no faiss here")


class LyingIndex(InMemoryIndex):
    """Returns ids that were never added."""

    def search(self, query: np.ndarray, k: int) -> Neighbours:
        return Neighbours(np.arange(5, dtype=np.int64), np.ones(5, np.float32))


@pytest.mark.parametrize(
    ("factory", "fails"),
    [(BrokenIndex, True), (broken_factory, True), (LyingIndex, False)],
    ids=["search", "factory", "unknown ids"],
)
@pytest.mark.fault(14)
def test_a_broken_index_leaves_the_own_tree(valkey: EmbeddedValkey, factory, fails) -> None:
    async def scenario() -> None:
        store = RedisStore(valkey.url, read_timeout_s=PATIENCE_S)
        made = RetrievalService(store, factory, vocab_size=VOCAB)
        await store_answers(made, [1, 2])
        found = await look(made, 1)
        assert [tree.tokens.tolist() for tree in found.trees] == [answer(1)]
        assert (made.counters().get("index_error", 0) > 0) == fails
        await made.aclose()

    asyncio.run(scenario())


# -- callers go away


@pytest.mark.fault(48)
def test_a_cancelled_call_leaves_no_reply_to_the_next(valkey: EmbeddedValkey) -> None:
    """Cancel at every step of the way; whoever asks next must get the own answer."""

    async def scenario() -> None:
        store = RedisStore(valkey.url, max_connections=1, read_timeout_s=PATIENCE_S)
        made = RetrievalService(store, FaissIndex, vocab_size=VOCAB)
        await store_answers(made, range(80))
        for n in range(80):
            call: Awaitable[Any] = (
                made.lookup(NS, prompt(n), k=1)
                if n % 2
                else made.write_back(NS, prompt(n), answer(n))
            )
            task = asyncio.ensure_future(call)
            for _ in range(n // 2):
                await asyncio.sleep(0)
            task.cancel()
            found = await made.lookup(NS, prompt(79 - n), k=1, deadline_s=PATIENCE_S)
            assert [tree.tokens.tolist() for tree in found.trees] == [answer(79 - n)]
        await asyncio.gather(task, return_exceptions=True)
        await made.aclose()
        assert not made.counters().keys() & {"store_error.protocol", "tree_rejected.foreign"}

    asyncio.run(scenario())


def test_abandoned_work_is_bounded() -> None:
    """A store that never returns holds at most MAX_PENDING_WRITES answers."""

    class Stuck(InMemoryStore):
        async def fetch(self, namespace: str, tree_ids: Sequence[int]) -> list[bytes | None]:
            await released.wait()
            return [None] * len(tree_ids)

    released = asyncio.Event()

    async def scenario() -> None:
        made = RetrievalService(Stuck(), InMemoryIndex, vocab_size=VOCAB)
        writes = [asyncio.create_task(made.write_back(NS, prompt(n), [n])) for n in range(100)]
        assert (await look_briefly(made, 0)).outcome == "timeout"
        assert made.counters()["write.dropped"] == 100 - MAX_PENDING_WRITES
        released.set()
        assert (await asyncio.gather(*writes)).count("stored") == MAX_PENDING_WRITES
        await made.aclose()

    asyncio.run(scenario())
