"""Retrieval without a server: limits of what is kept, and an index filled in several attempts."""

import asyncio
from collections.abc import Sequence

from retrieval.codec import MAX_DEPTH, MAX_NODES
from retrieval.filling import FOLLOW_BATCH, FOLLOW_EVERY_S, WARM_BATCH
from retrieval.index import InMemoryIndex
from retrieval.service import RetrievalService, Retrieved
from retrieval.store import InMemoryStore, StoreError, TreeStore
from tests.support import virtual_time

NS, VOCAB, PROMPT = "namespace", 50_000, [1, 2, 3]


def make(store: TreeStore) -> RetrievalService:
    return RetrievalService(store, InMemoryIndex, vocab_size=VOCAB)


async def look(made: RetrievalService) -> Retrieved:
    return await made.lookup(NS, PROMPT, deadline_s=10)


def test_a_long_answer_is_kept_up_to_the_depth_limit() -> None:
    async def scenario() -> None:
        made = make(InMemoryStore())
        assert await made.write_back(NS, PROMPT, [7] * (MAX_DEPTH + 5)) == "stored"
        [tree] = (await look(made)).trees
        assert len(tree) == MAX_DEPTH

    asyncio.run(scenario())


def test_a_tree_that_outgrows_the_limit_starts_over() -> None:
    async def scenario() -> None:
        made = make(InMemoryStore())
        for first in (1, 2, 3):
            await made.write_back(NS, PROMPT, [first] * (MAX_NODES // 2 - 1))
        [tree] = (await look(made)).trees
        assert set(tree.tokens.tolist()) == {3}

    asyncio.run(scenario())


def test_an_interrupted_warm_up_goes_on_where_it_stopped() -> None:
    class Shaky(InMemoryStore):
        fetched = 0
        fails_after = 2

        async def fetch(self, namespace: str, tree_ids: Sequence[int]) -> list[bytes | None]:
            if self.fails_after == 0:
                raise StoreError("timeout", "for this test")
            self.fails_after -= 1
            self.fetched += len(tree_ids)
            return await super().fetch(namespace, tree_ids)

    async def scenario() -> None:
        store, total = Shaky(), 3 * WARM_BATCH + 1
        store.fails_after = 10**6
        writer = make(store)
        for n in range(total):
            await writer.write_back(NS, [n], [n])
        store.fails_after, store.fetched = 2, 0
        made = make(store)
        assert not await made.warm(NS)
        assert made.sizes() == {NS: 2 * WARM_BATCH}
        store.fails_after = 10**6
        assert await made.warm(NS)
        assert made.sizes() == {NS: total}
        assert store.fetched == total  # nothing was read twice

    asyncio.run(scenario())


def test_what_breaks_the_stores_contract_stays_inside() -> None:
    class Broken(InMemoryStore):
        async def fetch(self, namespace: str, tree_ids: Sequence[int]) -> list[bytes | None]:
            raise ZeroDivisionError

    class Short(InMemoryStore):
        async def fetch(self, namespace: str, tree_ids: Sequence[int]) -> list[bytes | None]:
            return []

    async def scenario() -> None:
        for store in (Broken(), Short()):
            made = make(store)
            assert (await look(made)).outcome == "error"
            assert await made.write_back(NS, PROMPT, [1]) == "error"
        assert (await made.lookup(NS, [], deadline_s=10)).outcome == "error"

    asyncio.run(scenario())


def test_an_index_follows_what_others_write_and_what_expires() -> None:
    """Two services share a store; virtual time passes between the lookups of one of them."""

    async def scenario() -> None:
        store = InMemoryStore(ttl_s=1000, clock=virtual_time.now)
        writer, reader = make(store), make(store)
        assert await reader.warm(NS)
        for n in range(3 * FOLLOW_BATCH):
            await writer.write_back(NS, [n], [n])
        assert (await look(reader)).outcome == "miss"  # and it is too soon to look again
        assert reader.sizes() == {NS: 0}
        await asyncio.sleep(FOLLOW_EVERY_S)
        await look(reader)
        await asyncio.sleep(1)
        assert reader.sizes() == {NS: 3 * FOLLOW_BATCH}
        await asyncio.sleep(900)
        await writer.write_back(NS, [5], [5])  # keeps this one alive
        for _ in range(8):  # a part of the index at each look
            await asyncio.sleep(100)
            await look(reader)
        assert reader.sizes() == {NS: 1}

    virtual_time.run(scenario())


def test_all_indexes_together_are_bounded() -> None:
    async def scenario() -> None:
        made = RetrievalService(InMemoryStore(), InMemoryIndex, vocab_size=VOCAB, max_trees=32)
        for n in range(40):
            await made.write_back("large", [n], [1])
            if n % 4 == 0:
                await made.write_back("small", [n], [1])
        sizes = made.sizes()
        assert sum(sizes.values()) <= 32
        assert sizes["small"] == 10  # the largest gives way

    asyncio.run(scenario())
