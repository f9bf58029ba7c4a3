"""What publishing promises, in memory and on a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from retrieval.documents import MAX_DOCUMENT_BYTES, Documents, InMemoryDocuments
from retrieval.embedded import EmbeddedValkey
from retrieval.redis_documents import RedisDocuments
from retrieval.store import StoreError
from retrieval.threshold_store import MAX_HISTORY, Pointer, PublishRefusedError, ThresholdStore
from tests.support.servers import admin, answering

MODEL = "aabbccdd"
POINTER = f"vs:thresholds:active:{MODEL}"
Scenario = Callable[[Documents], Awaitable[None]]


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@asynccontextmanager
async def redis_documents(url: str) -> AsyncIterator[RedisDocuments]:
    # Contracts are about what, not when: a busy machine must not time out here.
    documents = RedisDocuments(url, connect_timeout_s=10.0, read_timeout_s=10.0)
    try:
        yield documents
    finally:
        await documents.aclose()


@pytest.fixture(params=["memory", "redis"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario on empty documents, in an event loop of its own."""
    if request.param == "memory":
        return lambda scenario: asyncio.run(scenario(InMemoryDocuments()))
    valkey: EmbeddedValkey = request.getfixturevalue("valkey")
    with admin(valkey) as client:
        client.flushall()

    async def main(scenario: Scenario) -> None:
        async with redis_documents(valkey.url) as documents:
            await scenario(documents)

    return lambda scenario: asyncio.run(main(scenario))


async def refused(call: Awaitable[object]) -> str:
    with pytest.raises(PublishRefusedError) as caught:
        await call
    return caught.value.reason


async def publish(store: ThresholdStore, *versions: str, model: str = MODEL) -> Pointer:
    """Put and activate one version after the other."""
    for version in versions:
        await store.put(model, version, f"text of {version}")
        pointer = await store.pointer(model)
        seen = pointer.revision if pointer else 0
        pointer = await store.activate(model, version, expected_revision=seen, reason="test")
    return pointer


def test_a_set_is_kept_for_ever_and_never_changed(run) -> None:
    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        assert await store.get("a1") is None
        assert await store.models() == []
        assert await store.put(MODEL, "a1", "text")
        assert not await store.put(MODEL, "a1", "text"), "a repeat is harmless"
        assert await refused(store.put(MODEL, "a1", "another text")) == "conflict"
        assert await store.get("a1") == "text"
        assert await store.versions(MODEL) == ["a1"]
        assert await store.versions("other") == []
        assert await store.models() == [MODEL]

    run(scenario)


def test_a_set_is_not_put_under_the_key_of_something_else(run) -> None:
    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        with pytest.raises(ValueError, match="letters and digits"):
            await store.put(MODEL, f"active:{MODEL}", "text")
        with pytest.raises(ValueError, match="bytes"):
            await store.put(MODEL, "a1", "x" * (MAX_DOCUMENT_BYTES + 1))
        assert await store.models() == []

    run(scenario)


def test_the_pointer_moves_by_compare_and_set(run) -> None:
    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        assert await store.pointer(MODEL) is None
        first = await publish(store, "a1")
        assert (first.version, first.revision, first.previous) == ("a1", 1, None)
        await store.put(MODEL, "b2", "text")
        stale = store.activate(MODEL, "b2", expected_revision=0, reason="")
        assert await refused(stale) == "stale_revision"
        assert await store.pointer(MODEL) == first
        second = await store.activate(MODEL, "b2", expected_revision=1, reason="better by 4 %")
        assert (second.version, second.revision, second.previous) == ("b2", 2, "a1")
        assert second.reason == "better by 4 %"
        assert second.epoch == first.epoch
        assert await store.pointer(MODEL) == second
        assert await store.pointer("other") is None

    run(scenario)


def test_only_a_kept_set_of_the_model_can_be_activated(run) -> None:
    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        await store.put("other", "a1", "text")
        for version in ("a1", "ff"):
            call = store.activate(MODEL, version, expected_revision=0, reason="")
            assert await refused(call) == "unknown_version"
        assert await store.pointer(MODEL) is None

    run(scenario)


def test_of_many_publishers_who_saw_the_same_exactly_one_wins(run) -> None:
    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        versions = [f"v{n}" for n in range(8)]
        for version in versions:
            await store.put(MODEL, version, "text")
        calls = [
            store.activate(MODEL, version, expected_revision=0, reason="race")
            for version in versions
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        [won] = [outcome for outcome in outcomes if isinstance(outcome, Pointer)]
        lost = [o.reason for o in outcomes if isinstance(o, PublishRefusedError)]
        assert lost == ["stale_revision"] * 7
        assert await store.pointer(MODEL) == won

    run(scenario)


def test_rollback_goes_back_step_by_step_and_never_in_a_circle(run) -> None:
    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        empty = store.rollback(MODEL, expected_revision=0, reason="")
        assert await refused(empty) == "no_previous"
        await publish(store, "a1", "b2", "c3")
        back = await store.rollback(MODEL, expected_revision=3, reason="slower")
        assert (back.version, back.revision, back.previous) == ("b2", 4, "a1")
        back = await store.rollback(MODEL, expected_revision=4, reason="slower")
        assert (back.version, back.revision, back.previous) == ("a1", 5, None)
        end = store.rollback(MODEL, expected_revision=5, reason="")
        assert await refused(end) == "no_previous"
        stale = store.rollback(MODEL, expected_revision=4, reason="")
        assert await refused(stale) == "stale_revision"
        assert [a.version for a in back.history] == ["a1", "b2", "c3", "b2", "a1"]

    run(scenario)


def test_confirming_the_active_set_does_not_make_it_its_own_previous(run) -> None:
    async def scenario(documents: Documents) -> None:
        pointer = await publish(ThresholdStore(documents), "a1", "b2", "b2")
        assert (pointer.version, pointer.revision, pointer.previous) == ("b2", 3, "a1")

    run(scenario)


def test_history_is_bounded_and_revisions_go_on(run) -> None:
    async def scenario(documents: Documents) -> None:
        pointer = await publish(
            ThresholdStore(documents), *(f"v{n}" for n in range(MAX_HISTORY + 3))
        )
        assert pointer.revision == MAX_HISTORY + 3
        assert len(pointer.history) == MAX_HISTORY
        assert pointer.history[0].revision == 4

    run(scenario)


def test_a_lease_has_one_holder(run) -> None:
    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        lease = await store.acquire_lease("recalibrate", 100)
        assert lease is not None
        assert await store.acquire_lease("recalibrate", 100) is None
        assert await store.acquire_lease("other", 100) is not None
        assert await store.renew_lease(lease, 100)
        await store.release_lease(lease)
        assert not await store.renew_lease(lease, 100)
        later = await store.acquire_lease("recalibrate", 100)
        assert later is not None
        assert later.token > lease.token
        await store.release_lease(lease)  # not its own any more
        assert await store.acquire_lease("recalibrate", 100) is None

    run(scenario)


def test_of_two_jobs_the_one_that_was_paused_past_its_lease_is_refused(run) -> None:
    """Its revision still fits, so only the fencing token tells."""

    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        for version in ("a1", "b2"):
            await store.put(MODEL, version, "text")
        paused = await store.acquire_lease("recalibrate", 100)
        assert paused is not None
        await store.release_lease(paused)  # as if it had lapsed
        running = await store.acquire_lease("recalibrate", 100)
        late = store.activate(MODEL, "a1", expected_revision=0, reason="", fence=paused)
        assert await refused(late) == "stale_fence"
        won = await store.activate(MODEL, "b2", expected_revision=0, reason="", fence=running)
        late = store.activate(MODEL, "a1", expected_revision=1, reason="", fence=paused)
        assert await refused(late) == "stale_fence"
        assert await store.pointer(MODEL) == won

    run(scenario)


def test_a_damaged_pointer_is_an_error_that_activating_mends(run) -> None:
    damaged = [b"", b"{", b"[1]", b'{"epoch": "e", "history": []}', b"\xff", b"[" * 100_000]
    damaged.append(b'{"epoch": "e", "history": [{"revision": "1", "version": "a1"}]}')
    two = '{"revision": 1, "version": "a1", "previous": null, "reason": ""}'
    damaged.append(f'{{"epoch": "e", "history": [{two}, {two}]}}'.encode())

    async def scenario(documents: Documents) -> None:
        store = ThresholdStore(documents)
        await store.put(MODEL, "a1", "text")
        for garbage in damaged:
            before = await documents.read(POINTER)
            assert await documents.swap(POINTER, before, garbage) == "done"
            if garbage:  # an empty value is as good as none
                with pytest.raises(StoreError) as caught:
                    await store.pointer(MODEL)
                assert caught.value.kind == "protocol"
            mended = await store.activate(MODEL, "a1", expected_revision=0, reason="mend")
            assert await store.pointer(MODEL) == mended

    run(scenario)


def test_leases_lapse_by_a_monotonic_clock() -> None:
    now = [0.0]

    async def scenario() -> None:
        store = ThresholdStore(InMemoryDocuments(clock=lambda: now[0]))
        first = await store.acquire_lease("job", 10)
        assert first is not None
        now[0] = 9
        assert await store.renew_lease(first, 10)
        now[0] = 18
        assert await store.acquire_lease("job", 10) is None
        now[0] = 19
        assert not await store.renew_lease(first, 10)
        assert await store.acquire_lease("job", 10) is not None

    asyncio.run(scenario())


def test_leases_lapse_on_the_server(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with redis_documents(valkey.url) as documents:
            lease = await documents.acquire("lapsing", 1000)
            assert lease is not None
            with admin(valkey) as client:
                assert 990_000 < client.pttl("vs:lease:lapsing") <= 1_000_000
                assert await documents.renew(lease, 2000)
                assert 1_990_000 < client.pttl("vs:lease:lapsing") <= 2_000_000
                client.delete("vs:lease:lapsing")  # what the server does when time is over
                assert client.ttl("vs:fence:lapsing") == -1, "tokens are never given twice"
            assert not await documents.renew(lease, 1000)
            later = await documents.acquire("lapsing", 1000)
            assert later is not None
            assert later.token == lease.token + 1

    asyncio.run(scenario())


def test_giant_values_come_cut_and_foreign_ones_are_store_errors(valkey: EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with redis_documents(valkey.url) as documents:
            store = ThresholdStore(documents)
            with admin(valkey) as client:
                client.set("vs:thresholds:feed", b"x" * (2 * MAX_DOCUMENT_BYTES))
                client.delete("vs:thresholds:beef", POINTER)
                client.rpush("vs:thresholds:beef", "no text")
                client.rpush(POINTER, "no pointer")
            text = await store.get("feed")
            assert text is not None
            assert len(text) == MAX_DOCUMENT_BYTES + 1
            for call in (store.get("beef"), store.pointer(MODEL)):
                with pytest.raises(StoreError) as caught:
                    await call
                assert caught.value.kind == "protocol"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "loading"),
        (b"-NOAUTH Authentication required.\r\n", "auth"),
        (b"-READONLY You can't write against a read only replica.\r\n", "readonly"),
        (b"-NOPERM this user has no permissions\r\n", "auth"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", None),
    ],
    ids=["loading", "auth", "readonly", "noperm", "http"],
)
def test_whatever_a_server_answers_only_store_errors_come_out(reply: bytes, kind) -> None:
    async def scenario() -> None:
        async with answering(reply) as url, redis_documents(url) as documents:
            store = ThresholdStore(documents)
            for call in (
                store.pointer(MODEL),
                store.get("a1"),
                store.versions(MODEL),
                store.put(MODEL, "a1", "text"),
                store.activate(MODEL, "a1", expected_revision=0, reason=""),
                store.acquire_lease("job", 10),
            ):
                with pytest.raises(StoreError) as caught:
                    await call
                assert kind is None or caught.value.kind == kind

    asyncio.run(scenario())


def test_a_script_that_answers_nonsense_is_a_store_error() -> None:
    async def scenario() -> None:
        async with answering(b"+OK\r\n") as url, redis_documents(url) as documents:
            for call in (documents.acquire("job", 10), documents.swap("k", None, b"v")):
                with pytest.raises(StoreError):
                    await call

    asyncio.run(scenario())
