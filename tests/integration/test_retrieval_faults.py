"""Whatever happens to the store or the index, a lookup costs its deadline at most and raises
nothing. All against a real Valkey process that is killed, stopped, filled or made to lie."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

from retrieval.breaker import CircuitBreaker
from retrieval.codec import MAX_BLOB_BYTES, StoredTree, encode
from retrieval.embedded import EmbeddedValkey, EmbeddedValkeyError
from retrieval.faiss_index import FaissIndex
from retrieval.index import InMemoryIndex, Neighbours
from retrieval.namespace import namespace, tree_id
from retrieval.redis_store import RedisStore
from retrieval.service import MAX_PENDING_WRITES, RetrievalService, Retrieved
from retrieval.store import InMemoryStore
from tests.support.servers import admin, answering, delayed, stopped
from valuspec.tree import DraftTree

NS = namespace("tenant", "model", "tokenizer")
VOCAB = 50_000
# What production uses. A busy machine wakes a sleeper late; what is told apart is one deadline
# and a stalled client.
DEADLINE_S = 0.05
LATE_S = 0.5
# Where a test is about what is found, a busy machine must not make it a timeout.
PATIENCE_S = 10.0


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@asynccontextmanager
async def service(url: str, **options: Any) -> AsyncIterator[RetrievalService]:
    """With production timeouts, for tests of faults."""
    made = RetrievalService(RedisStore(url), FaissIndex, vocab_size=VOCAB, **options)
    try:
        yield made
    finally:
        await made.aclose()


@asynccontextmanager
async def patient_service(url: str, **options: Any) -> AsyncIterator[RetrievalService]:
    """Without timeouts worth mentioning, for everything else."""
    store = RedisStore(url, connect_timeout_s=PATIENCE_S, read_timeout_s=PATIENCE_S)
    made = RetrievalService(store, FaissIndex, vocab_size=VOCAB, **options)
    try:
        yield made
    finally:
        await made.aclose()


def prompt(n: int) -> list[int]:
    return [1, 2, 3, 10_000 + n, 20_000 + n % 7]


def answer(n: int) -> list[int]:
    return [30_000 + n, 4, 5]


def tree_key(n: int) -> str:
    return f"vs:{{{NS}}}:tree:{tree_id(prompt(n))}"


async def store_answers(made: RetrievalService, numbers: Sequence[int]) -> None:
    for n in numbers:
        assert await made.write_back(NS, prompt(n), answer(n)) == "stored"


async def fill(valkey: EmbeddedValkey, numbers: Sequence[int]) -> None:
    async with patient_service(valkey.url) as made:
        await store_answers(made, numbers)


async def look(made: RetrievalService, n: int, k: int = 16) -> Retrieved:
    return await made.lookup(NS, prompt(n), k, deadline_s=PATIENCE_S)


async def look_briefly(made: RetrievalService, n: int) -> Retrieved:
    started = time.perf_counter()
    found = await made.lookup(NS, prompt(n), deadline_s=DEADLINE_S)
    assert time.perf_counter() - started < DEADLINE_S + LATE_S
    return found


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions are not ours to signal
            await asyncio.sleep(0.005)


async def eventually_hit(made: RetrievalService) -> None:
    async with asyncio.timeout(10):
        while (await look_briefly(made, 1)).outcome != "hit":  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)


def quick_breaker() -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=3, cooldown_s=0.1)


# -- what retrieval is for


def test_finds_the_own_tree_first_and_similar_ones_after_it(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            assert (await look(made, 3)).outcome == "miss"
            await store_answers(made, range(30))
            found = await look(made, 3, k=5)
            assert found.outcome == "hit"
            assert found.trees[0].tokens.tolist() == answer(3)
            assert found.similarities[0] == pytest.approx(1.0, abs=1e-3)
            assert found.similarities == sorted(found.similarities, reverse=True)
            # The other prompts with the same last token are the most similar ones.
            others = {int(tree.tokens[0]) - 30_000 for tree in found.trees[1:]}
            assert others == {10, 17, 24, others.difference({10, 17, 24}).pop()}
            assert made.counters()["lookup.hit"] == 1

    asyncio.run(scenario())


def test_answers_to_one_prompt_merge(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            for output in ([7, 8, 9], [7, 8, 10], [7, 8, 9]):
                await made.write_back(NS, prompt(0), output)
            [tree] = (await look(made, 0)).trees
            assert tree.tokens.tolist() == [7, 8, 9, 10]
            assert tree.parents.tolist() == [-1, 0, 1, 1]
            assert tree.counts.tolist() == [3, 3, 2, 1]

    asyncio.run(scenario())


def test_concurrent_write_backs_lose_no_count(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await asyncio.gather(*(made.write_back(NS, prompt(0), [7]) for _ in range(20)))
            [tree] = (await look(made, 0)).trees
            assert tree.counts.tolist() == [20]

    asyncio.run(scenario())


def test_two_services_share_one_store(valkey: EmbeddedValkey) -> None:
    """The own tree is found even if another replica wrote it after this one had warmed up."""

    async def scenario() -> None:
        async with patient_service(valkey.url) as one, patient_service(valkey.url) as two:
            assert await two.warm(NS)
            await store_answers(one, [1])
            assert (await look(two, 1)).outcome == "hit"

    asyncio.run(scenario())


def test_tenants_do_not_meet(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await store_answers(made, [1])
            other = namespace("another tenant", "model", "tokenizer")
            assert (await made.lookup(other, prompt(1), deadline_s=PATIENCE_S)).outcome == "miss"
            # Even a blob copied under the other tenant's key is refused.
            with admin(valkey) as client:
                client.copy(tree_key(1), f"vs:{{{other}}}:tree:{tree_id(prompt(1))}")
            assert (await made.lookup(other, prompt(1), deadline_s=PATIENCE_S)).outcome == "miss"
            assert made.counters()["tree_rejected.foreign"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt_ids", "output_ids"),
    [([], [1]), ([1], []), ([1], [VOCAB]), ([1], [-1]), ([1], [2**40])],
)
def test_senseless_answers_are_not_stored(valkey, prompt_ids, output_ids) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            assert await made.write_back(NS, prompt_ids, output_ids) == "dropped"
            with admin(valkey) as client:
                assert client.keys("vs:*") == []

    asyncio.run(scenario())


def test_trees_survive_a_restart_of_everything(tmp_path: Path) -> None:
    async def fill(url: str) -> None:
        async with patient_service(url) as made:
            await store_answers(made, range(20))

    async def find(url: str) -> None:
        async with patient_service(url) as made:
            assert await made.warm(NS)
            assert made.sizes() == {NS: 20}
            assert len((await look(made, 5, k=8)).trees) == 8

    for use in (fill, find):
        with EmbeddedValkey(tmp_path) as valkey:
            asyncio.run(use(valkey.url))


def test_the_index_is_bounded(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url, max_trees=16) as made:
            await store_answers(made, range(40))
            assert made.sizes()[NS] <= 16
            assert (await look(made, 39)).outcome == "hit"

    asyncio.run(scenario())


# -- the store fails


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


def test_a_server_that_wants_a_password(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        with admin(valkey) as client:
            client.config_set("requirepass", "secret")
            async with patient_service(valkey.url) as made:
                assert await made.write_back(NS, prompt(2), answer(2)) == "error"
                assert (await look(made, 1)).outcome == "error"
                assert made.counters()["store_error.auth"] >= 2

    asyncio.run(scenario())


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
def test_servers_that_answer_nonsense(reply: bytes) -> None:
    async def scenario() -> None:
        async with answering(reply) as url, service(url) as made:
            for n in range(8):
                assert (await look_briefly(made, n)).outcome in {"timeout", "error", "open", "miss"}
                assert await made.write_back(NS, prompt(n), answer(n)) != "stored"

    asyncio.run(scenario())


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


# -- the embedded server


def test_one_server_per_folder(tmp_path: Path) -> None:
    with (
        EmbeddedValkey(tmp_path),
        pytest.raises(EmbeddedValkeyError, match="in use by another"),
    ):
        EmbeddedValkey(tmp_path).start()


def test_listens_on_no_network_address(valkey: EmbeddedValkey) -> None:
    with admin(valkey) as client:
        settings = client.config_get("*")
    assert settings["port"] == "0"
    assert settings["maxmemory-policy"] == "volatile-lfu"
    socket = Path(valkey.url.removeprefix("unix://"))
    assert socket.stat().st_mode & 0o077 == 0


def test_a_temporary_folder_goes_with_its_server() -> None:
    with EmbeddedValkey() as valkey:
        folder = Path(valkey.url.removeprefix("unix://")).parent
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(EmbeddedValkeyError, match="not running"):
        _ = valkey.url


def test_a_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedValkeyError, match="too long for a unix socket"):
        EmbeddedValkey(tmp_path / ("x" * 100)).start()


def test_the_server_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    """Its owner had no chance to stop it; two servers must not write to one folder."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from retrieval.embedded import EmbeddedValkey\n"
        "print(EmbeddedValkey(Path(sys.argv[1])).start().pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    orphan = int(owner.stdout.readline())
    with Redis.from_url(f"unix://{tmp_path / 'valkey.sock'}") as client:
        client.set("kept", "yes")
        owner.kill()
        owner.communicate()
        assert client.info("server")["process_id"] == orphan  # it lives on
        with EmbeddedValkey(tmp_path) as valkey, admin(valkey) as fresh:
            assert valkey.pid != orphan
            assert fresh.get("kept") == b"yes"
            # The old connection leads to no second server: it is dead, or it is the new one's.
            assert client.info("server")["process_id"] == valkey.pid
