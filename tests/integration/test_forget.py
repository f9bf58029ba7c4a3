"""A tenant asks for deletion: rows and trees are gone, verified by search, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cli import main
from retrieval.embedded import EmbeddedValkey
from retrieval.forgetting import forget_trees
from retrieval.namespace import namespace
from retrieval.store import InMemoryStore, StoreError
from retrieval.trajectory_log import TrajectoryLog, log_files, read_log
from tests.support.log_rows import logged
from tests.support.retrieving import PATIENCE_S, patient_service
from tests.support.servers import admin

MODELS = [("model", "tokenizer"), ("model-2", "tokenizer")]
NUM_ANSWERS = 5


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def folder(tmp_path) -> Path:
    """A log in which both tenants have rows of both models."""
    for number in range(NUM_ANSWERS):
        log = TrajectoryLog(tmp_path / "log")
        for model, tokenizer in MODELS:
            for tenant in ("acme", "other"):
                log.add(
                    logged(
                        number,
                        namespace=namespace(tenant, model, tokenizer),
                        model_fingerprint=model,
                        tokenizer_fingerprint=tokenizer,
                    )
                )
        log.close(PATIENCE_S)
    return tmp_path / "log"


def test_rows_and_trees_of_one_tenant_are_gone_and_nobody_elses(valkey, folder, capsys) -> None:
    theirs = [namespace("acme", *model) for model in MODELS]
    others = [namespace("other", *model) for model in MODELS]
    prompts = [tuple(range(n, n + 40)) for n in range(NUM_ANSWERS)]

    async def scenario() -> None:
        async with patient_service(valkey.url) as serving:
            for name in theirs + others:
                for prompt in prompts:
                    await serving.write_back(name, prompt, [1, 2, 3])
            command = ["forget", "acme", "--log", str(folder), "--redis-url", valkey.url]
            assert await asyncio.to_thread(main, command) == 0
            # The service that was running all the while, with its index in memory:
            for prompt in prompts:
                for name in theirs:
                    found = await serving.lookup(name, prompt, deadline_s=PATIENCE_S)
                    assert found.outcome == "miss"
                for name in others:
                    found = await serving.lookup(name, prompt, deadline_s=PATIENCE_S)
                    assert len(found.trees) == NUM_ANSWERS

    asyncio.run(scenario())
    out = capsys.readouterr().out
    assert f"{2 * NUM_ANSWERS} draft trees deleted" in out
    assert f"{2 * NUM_ANSWERS} log rows deleted" in out
    with admin(valkey) as client:
        keys = [key.decode() for key in client.keys("*")]
    assert not [key for key in keys if any(name in key for name in theirs)]
    assert len([key for key in keys if ":tree:" in key]) == 2 * NUM_ANSWERS
    read = read_log([folder])
    assert not read.skipped
    assert [row.namespace for row in read.trajectories] == others * NUM_ANSWERS
    for path in log_files([folder]):
        assert not any(name.encode() in path.read_bytes() for name in theirs)


def test_what_could_not_be_searched_is_said_and_is_a_failure(valkey, folder, capsys) -> None:
    (folder / "foreign.parquet").write_bytes(b"something")
    command = ["forget", "acme", "--log", str(folder), "--redis-url"]
    assert main([*command, valkey.url]) == 1
    assert "foreign.parquet: could not be searched" in capsys.readouterr().err
    (folder / "foreign.parquet").unlink()
    assert main([*command, "unix:///nowhere/valkey.sock"]) == 1
    assert "draft trees: unreachable" in capsys.readouterr().err
    assert main([*command, valkey.url]) == 0
    assert main(["forget", "acme", "--log", str(folder / "typo"), "--redis-url", valkey.url]) == 1


def test_without_a_log_the_models_are_given(valkey, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path))

    async def store() -> None:
        async with patient_service(valkey.url) as serving:
            await serving.write_back(namespace("acme", "m", "t"), [1, 2], [3])

    asyncio.run(store())
    assert main(["forget", "acme", "--redis-url", valkey.url]) == 1
    assert "--fingerprints" in capsys.readouterr().err
    given = ["--fingerprints", "m", "t", "--fingerprints", "m2", "t"]
    assert main(["forget", "acme", "--redis-url", valkey.url, *given]) == 0
    assert "1 draft trees deleted, models searched: 2" in capsys.readouterr().out


def test_a_store_that_keeps_what_is_dropped_is_found_out() -> None:
    class Keeping(InMemoryStore):
        async def drop(self, namespace, tree_ids) -> None:
            return None

    async def scenario() -> None:
        store = Keeping()
        await store.put("n", 1, b"tree")
        with pytest.raises(StoreError, match="listed after being dropped"):
            await forget_trees(store, "n")

    asyncio.run(scenario())
