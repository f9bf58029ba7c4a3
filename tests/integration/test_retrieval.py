"""What retrieval is for, on a real Valkey and FAISS."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrieval.embedded import EmbeddedValkey
from retrieval.namespace import namespace, tree_id
from tests.support.retrieving import (
    NS,
    PATIENCE_S,
    VOCAB,
    answer,
    eventually_hit,
    look,
    patient_service,
    prompt,
    service,
    store_answers,
    tree_key,
)
from tests.support.servers import admin, stopped


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


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
            assert {10, 17, 24} <= others
            assert made.counters()["lookup.hit"] == 1

    asyncio.run(scenario())


def test_a_new_replica_is_told_the_newest_answers_of_every_namespace(
    valkey: EmbeddedValkey,
) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await store_answers(made, range(6))
            await made.write_back("another", prompt(9), answer(9))
            length = len(answer(0))
            spaces = [NS, "another"]
            recent = await made.recent(spaces, 2 * 3 * length)
            mine = [tree.tokens.tolist() for name, tree in recent if name == NS]
            assert mine == [answer(n) for n in (3, 4, 5)], "half of the nodes, the newest last"
            assert [name for name, _ in recent if name != NS] == ["another"]
            everything = await made.recent(spaces, 1000 * length)
            assert len(everything) == 7
        async with service(valkey.url) as hasty:
            await eventually_hit(hasty)
            with stopped(valkey):
                assert await hasty.recent(spaces, 1000) == []

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


@pytest.mark.fault(16)
def test_concurrent_write_backs_lose_no_count(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await asyncio.gather(*(made.write_back(NS, prompt(0), [7]) for _ in range(20)))
            [tree] = (await look(made, 0)).trees
            assert tree.counts.tolist() == [20]

    asyncio.run(scenario())


@pytest.mark.fault(16)
def test_two_services_share_one_store(valkey: EmbeddedValkey) -> None:
    """The own tree is found even if another replica wrote it after this one had warmed up."""

    async def scenario() -> None:
        async with patient_service(valkey.url) as one, patient_service(valkey.url) as two:
            assert await two.warm(NS)
            await store_answers(one, [1])
            assert (await look(two, 1)).outcome == "hit"

    asyncio.run(scenario())


@pytest.mark.fault(10, 11)
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
