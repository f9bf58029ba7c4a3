"""`valuspec ingest`, `tenants`, and forgetting parts, on a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments.cli import main
from jobs import hub
from jobs import ingest as ingesting
from retrieval.documents import InMemoryDocuments
from retrieval.embedded import EmbeddedValkey
from retrieval.namespace import tree_id
from retrieval.redis_documents import RedisDocuments
from retrieval.store import InMemoryStore, StoreError
from retrieval.tenants import Owner, TenantRegistry
from tests.support.retrieving import PATIENCE_S, patient_service
from tests.support.servers import admin

OWNER = Owner("acme", "model", "tokenizer")


@pytest.fixture
def valkey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedValkey]:
    monkeypatch.setenv("VALUSPEC_CACHE", str(tmp_path / "cache"))
    with EmbeddedValkey() as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        yield server


def prompt(n: int) -> list[int]:
    return [1, 2, 3, 1000 + n]


def write_lines(path: Path, numbers: Sequence[int], *, mode: str = "w") -> Path:
    with path.open(mode) as file:
        for n in numbers:
            file.write(json.dumps({"prompt_ids": prompt(n), "answer_ids": [n, 5, 6]}) + "\n")
    return path


def found(valkey: EmbeddedValkey, owner: Owner, numbers: Sequence[int]) -> dict[int, list[int]]:
    """The trees' counts of the prompts that have one."""

    async def look() -> dict[int, list[int]]:
        trees = {}
        async with patient_service(valkey.url) as made:
            for n in numbers:
                got = await made.lookup(owner.namespace, prompt(n), 1, PATIENCE_S)
                if got.trees:
                    trees[n] = got.trees[0].counts.tolist()
        return trees

    return asyncio.run(look())


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_a_file_is_stored_and_bad_lines_are_named(valkey, tmp_path, capsys) -> None:
    path = write_lines(tmp_path / "answers.jsonl", range(4))
    with path.open("a") as file:
        file.write("not json\n\n" + json.dumps({"prompt": "text", "answer": "text"}) + "\n")
    write_lines(path, range(4, 700), mode="a")
    command = ("ingest", str(path), "--tenant", "acme")
    assert run(*command) == 2  # the store knows no model
    assert "--fingerprints" in capsys.readouterr().err
    assert run(*command, "--fingerprints", "model", "tokenizer") == 1
    said = capsys.readouterr()
    assert "700 answers stored, 2 lines skipped" in said.out
    assert "answers.jsonl:5: not JSON" in said.err
    assert "answers.jsonl:7: text, and no tokenizer given" in said.err
    assert found(valkey, OWNER, range(700)) == {n: [1, 1, 1] for n in range(700)}

    # Once more: nothing is read twice. Then it grows, and is read from where it ended.
    assert run(*command) == 0  # by now the store knows the model
    assert "0 answers stored" in capsys.readouterr().out
    write_lines(path, [0, 700], mode="a")
    assert run(*command) == 0
    assert "2 answers stored" in capsys.readouterr().out
    assert found(valkey, OWNER, [0, 1, 700]) == {0: [2, 2, 2], 1: [1, 1, 1], 700: [1, 1, 1]}
    # Another file under the same name is another file.
    write_lines(path, [800])
    assert run(*command) == 0
    assert found(valkey, OWNER, [800]) == {800: [1, 1, 1]}


def test_text_is_tokenised_as_the_model_would(valkey, tmp_path) -> None:
    from tests.support.tiny_models import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"prompt": "ab", "answer": "xyz", "finish_reason": "stop"}))
    given = ("--fingerprints", "model", "tokenizer", "--tokenizer", str(tmp_path / "tokenizer"))
    assert run("ingest", str(path), *given) == 0

    async def look() -> list[int]:
        async with patient_service(valkey.url) as made:
            owner = Owner("default", "model", "tokenizer")
            trees = (await made.lookup(owner.namespace, list(b"ab"), 1, PATIENCE_S)).trees
            return trees[0].tokens.tolist()

    assert asyncio.run(look()) == [*b"xyz", 257]


def test_a_run_that_is_cut_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The store fails at every call in turn; each run gets one batch further, none is lost."""
    path = write_lines(tmp_path / "many.jsonl", range(5 * ingesting.BATCH + 3))

    class Failing(InMemoryStore):
        calls_left = 0

        async def put_many(self, namespace: str, blobs: Any) -> None:
            if self.calls_left == 0:
                raise StoreError("timeout", "for this test")
            self.calls_left -= 1
            await super().put_many(namespace, blobs)

    async def scenario() -> None:
        store, documents = Failing(), InMemoryDocuments()
        tenants = TenantRegistry(documents)
        progress = ingesting.Progress(tmp_path / "progress", path, OWNER, "c")
        arguments: dict[str, Any] = {"trees": store, "tenants": tenants, "tokenizer": None}
        for _ in range(5):
            store.calls_left = 1
            with pytest.raises(StoreError):
                await ingesting.ingest(path, OWNER, "c", progress=progress, **arguments)
        store.calls_left = 9
        done = await ingesting.ingest(path, OWNER, "c", progress=progress, **arguments)
        assert done.num_answers == 3
        assert await store.count(OWNER.namespace) == 5 * ingesting.BATCH + 3

    asyncio.run(scenario())


def test_a_corpus_or_single_trees_can_be_forgotten(valkey, tmp_path, capsys) -> None:
    given = ("--tenant", "acme", "--fingerprints", "model", "tokenizer")
    for name, numbers in (("one", range(5)), ("two", range(5, 8))):
        path = write_lines(tmp_path / f"{name}.jsonl", numbers)
        assert run("ingest", str(path), "--corpus", name, *given) == 0
    capsys.readouterr()
    assert run("tenants", "list") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["acme", "model", "8", "one,", "two"]
    assert run("forget", "acme", "--corpus", "one") == 0
    assert "5 draft trees deleted" in capsys.readouterr().out
    assert list(found(valkey, OWNER, range(8))) == [5, 6, 7]
    assert run("forget", "acme", "--id", str(tree_id(prompt(6))), "1234") == 0
    assert "1 draft trees deleted" in capsys.readouterr().out
    assert list(found(valkey, OWNER, range(8))) == [5, 7]


def test_a_tenant_is_dropped_completely_and_nobody_else(valkey, tmp_path, capsys) -> None:
    """Its other models and its salted requests included; nothing of it is left in the store."""
    owners = [
        OWNER,
        Owner("acme", "model-2", "tokenizer"),
        Owner("acme#0123456789abcdef", "model", "tokenizer"),
        Owner("acme-too", "model", "tokenizer"),
    ]

    async def serve() -> None:
        documents = RedisDocuments(valkey.url)
        tenants = TenantRegistry(documents)
        async with patient_service(valkey.url) as made:
            for owner in owners:
                await tenants.register(owner)
                await made.write_back(owner.namespace, prompt(0), [1, 2])
        await documents.aclose()

    asyncio.run(serve())
    path = write_lines(tmp_path / "corpus.jsonl", range(3))
    given = ("--tenant", "acme", "--fingerprints", "model", "tokenizer")
    assert run("ingest", str(path), *given) == 0
    capsys.readouterr()
    assert run("tenants", "drop", "acme") == 0
    assert "5 draft trees deleted, models searched: 3" in capsys.readouterr().out
    with admin(valkey) as client:
        keys = [key.decode() for key in client.keys("*")]
        assert client.scard("vs:tenants") == 1
    gone = [owner.namespace for owner in owners[:3]]
    assert not [key for key in keys if any(name in key for name in gone)]
    assert found(valkey, owners[3], [0])
    assert run("tenants", "list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "tenant",
        "acme-too",
    ]


def test_data_sets_of_the_hub_are_read_as_files(tmp_path, monkeypatch, capsys) -> None:
    write_lines(tmp_path / "train.jsonl", [1])
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.dataset_files("owner/name") == [tmp_path / "train.jsonl"]
    assert asked == [("owner/name", {"repo_type": "dataset", "allow_patterns": ["*.jsonl"]})]
    for source in ("no/such/file", "nothing", str(tmp_path)):
        with pytest.raises(hub.NoDataError):
            hub.dataset_files(source)
    assert run("ingest", "nothing") == 2
    assert "no file" in capsys.readouterr().err
