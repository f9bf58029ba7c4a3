"""The users and certificates that deployments/secrets.sh makes, on a real server.

The product must work with the few commands its users are granted, and reach Valkey by the address
the nodes' environment has: TLS, with an authority of the cluster's own. The embedded server is
built without TLS, so a proxy in front of it ends the encryption.
"""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, RedisError

import deployments
from retrieval.embedded import EmbeddedValkey
from retrieval.redis_documents import RedisDocuments
from retrieval.redis_store import RedisStore
from retrieval.store import StoreError
from retrieval.tenants import Owner, TenantRegistry
from retrieval.threshold_store import ThresholdStore
from tests.support.publishing import publish
from tests.support.retrieving import NS, answer, look, patient_service, prompt, store_answers
from tests.support.servers import admin
from tests.support.threshold_sets import set_like_shipped

SCRIPT = Path(deployments.__file__).parent / "secrets.sh"
MODEL = "aabbccdd"
OWNER = Owner("another tenant", "model", "tokenizer")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's home folder, with the secrets in it."""
    home = tmp_path_factory.mktemp("home")
    subprocess.run(["sh", SCRIPT, home / "secrets"], check=True, capture_output=True)
    return home


@pytest.fixture(scope="module")
def valkey(home: Path) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        with admin(server) as client:
            client.config_set("maxmemory-policy", "volatile-lfu")
            for line in (home / "secrets/users.acl").read_text().splitlines():
                _, user, *rules = line.split()
                if user != "default":  # by which the fixtures come in
                    client.execute_command("ACL", "SETUSER", user, *rules)
        yield server


def address(home: Path, name: str) -> str:
    """What the nodes' processes find in their environment."""
    script = f'. "$HOME/secrets/cluster-env"; printf %s "${name}"'
    environment = {"HOME": str(home), "RAY_HEAD_IP": "127.0.0.1"}
    return subprocess.run(
        ["sh", "-c", script], env=environment, check=True, capture_output=True, text=True
    ).stdout


@asynccontextmanager
async def encrypted(valkey: EmbeddedValkey, folder: Path) -> AsyncIterator[int]:
    """A port that ends TLS with the certificate in `folder`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "valkey-cert.pem", folder / "valkey-key.pem")
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_unix_connection(valkey.url.removeprefix("unix://"))
        for one in (pump(reader, forth), pump(back, writer)):
            pumps.add(asyncio.create_task(one))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for one in pumps:
            one.cancel()


@asynccontextmanager
async def url_of(valkey: EmbeddedValkey, home: Path, name: str) -> AsyncIterator[str]:
    async with encrypted(valkey, home / "secrets") as port:
        given = address(home, name)
        assert given.startswith("rediss://")
        yield given.replace(":6380/", f":{port}/")


def test_serving_needs_no_more_than_it_is_granted(valkey, home) -> None:
    async def scenario() -> None:
        made_by_job = set_like_shipped(MODEL, "a")
        published = ThresholdStore.at(valkey.url)
        await publish(published, made_by_job)
        await published.aclose()
        async with url_of(valkey, home, "REDIS_URL") as url, patient_service(url) as made:
            documents = RedisDocuments(url, connect_timeout_s=10, read_timeout_s=10)
            await TenantRegistry(documents).register(OWNER)
            await documents.aclose()
            await store_answers(made, range(5))
            assert (await look(made, 3)).outcome == "hit"
            assert len(await made.recent([NS], 1000)) == 5
            with admin(valkey) as client:  # damaged, so it is deleted
                client.set(f"vs:{{{NS}}}:tree:1", b"nonsense")
            store = RedisStore(url, connect_timeout_s=10, read_timeout_s=10)
            await store.drop(NS, [1])
            await store.aclose()
            assert not [name for name in made.counters() if name.startswith("store_error")]
            thresholds = ThresholdStore.at(url)
            pointer = await thresholds.pointer(MODEL)
            assert pointer is not None
            assert await thresholds.get(pointer.version) == made_by_job.to_json()
            with pytest.raises(StoreError) as refused:
                await publish(thresholds, set_like_shipped(MODEL, "b"))
            assert refused.value.kind == "auth", "replicas follow; they do not publish"
            await thresholds.aclose()

    asyncio.run(scenario())


def test_jobs_need_no_more_than_they_are_granted(valkey, home) -> None:
    async def scenario() -> None:
        async with url_of(valkey, home, "VALUSPEC_JOBS_REDIS_URL") as url:
            documents = RedisDocuments(url, connect_timeout_s=10, read_timeout_s=10)
            lease = await documents.acquire("recalibrate", 60)
            assert lease is not None
            assert await documents.renew(lease, 60)
            assert await documents.swap("vs:thresholds:active:x", None, b"1", lease) == "done"
            await documents.release(lease)
            registry = TenantRegistry(documents)
            await registry.register(OWNER)
            assert OWNER in await registry.owners()
            thresholds = ThresholdStore.at(url)
            await publish(thresholds, set_like_shipped(MODEL, "c"))
            await thresholds.aclose()
            async with patient_service(url) as made:
                await made.write_back(OWNER.namespace, prompt(9), answer(9))
            store = RedisStore(url, connect_timeout_s=10, read_timeout_s=10)
            assert await registry.drop(store, OWNER) == 1
            assert OWNER not in await registry.owners()
            await store.aclose()
            await documents.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["REDIS_URL", "VALUSPEC_JOBS_REDIS_URL"])
def test_no_user_of_the_product_can_do_anything_else(valkey, home, name) -> None:
    user, _, rest = address(home, name).removeprefix("rediss://").partition(":")
    path = valkey.url.removeprefix("unix://")
    with Redis(unix_socket_path=path, username=user, password=rest.partition("@")[0]) as client:
        assert client.ping()
        for command in (
            ["KEYS", "*"],
            ["FLUSHALL"],
            ["CONFIG", "GET", "*"],
            ["ACL", "LIST"],
            ["SCAN", "0"],
            ["SET", "gcs", "x"],
            ["GETRANGE", "other", "0", "1"],
            ["MIGRATE", "host", "1", "vs:{a}:trees", "0", "1"],
            ["CLIENT", "KILL", "USER", "admin"],
        ):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)
    wrong = Redis(unix_socket_path=path, username=user, password="wrong")
    with wrong as client, pytest.raises(RedisError):
        client.ping()


def test_a_server_of_another_authority_is_not_talked_to(valkey, home, tmp_path) -> None:
    subprocess.run(["sh", SCRIPT, tmp_path / "secrets"], check=True, capture_output=True)

    async def scenario() -> None:
        async with encrypted(valkey, tmp_path / "secrets") as port:
            url = address(home, "REDIS_URL").replace(":6380/", f":{port}/")
            store = RedisStore(url, connect_timeout_s=10, read_timeout_s=10)
            with pytest.raises(StoreError) as refused:
                await store.fetch(NS, [1])
            assert refused.value.kind == "unreachable"
            await store.aclose()

    asyncio.run(scenario())
