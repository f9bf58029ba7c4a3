"""What the store answers instead of what was asked, and what it has lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from retrieval import codec, namespace
from retrieval.breaker import CircuitBreaker
from retrieval.embedded import EmbeddedValkey
from tests.support.retrieving import (
    NS,
    answer,
    look,
    patient_service,
    prompt,
    store_answers,
    tree_key,
)
from tests.support.servers import admin, answering


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.mark.fault(4)
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("-OOM command not allowed when used memory > 'maxmemory'.", "full"),
        ("-READONLY You can't write against a read only replica.", "readonly"),
        ("-MISCONF Errors writing to the AOF file", "readonly"),
        ("-MASTERDOWN Link with MASTER is down", "readonly"),
        ("-MOVED 3999 127.0.0.1:6381", "moved"),
        ("-LOADING the dataset is being loaded in memory", "loading"),
        ("-NOAUTH Authentication required.", "auth"),
        ("-NOPERM this user has no permissions", "auth"),
        ("-BUSY a script is running", "protocol"),
    ],
)
def test_every_refusal_is_counted_once_by_kind(reply: str, kind: str) -> None:
    async def scenario() -> None:
        never = CircuitBreaker(failure_threshold=1000)
        async with (
            answering(f"{reply}\r\n".encode()) as url,
            patient_service(url, breaker=never) as made,
        ):
            assert not await made.warm(NS)
            for n in range(5):
                found = await look(made, n)
                assert (found.outcome, found.trees) == ("error", [])
                assert await made.write_back(NS, prompt(n), answer(n)) == "error"
            counts = made.counters()
            failed = {name: n for name, n in counts.items() if name.startswith("store_error")}
            # Reads, the read before each write, and attempts to fill the index: one of ours and at
            # most one by each lookup, which are still under way or not begun.
            assert set(failed) == {f"store_error.{kind}"}
            assert counts["lookup.error"] == 5
            assert counts["write.error"] == 5
            assert sum(failed.values()) - 5 - 5 in range(1, 7)

    asyncio.run(scenario())


@pytest.mark.fault(6)
def test_lost_writes_are_misses(valkey: EmbeddedValkey) -> None:
    """A replica of the store takes over that has every other tree."""

    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            await store_answers(made, range(40))
            with admin(valkey) as client:
                client.delete(*(tree_key(n) for n in range(0, 40, 2)))
            found = [await look(made, n, k=1) for n in range(40)]
            assert [len(one.trees) for one in found] == [n % 2 for n in range(40)]
            assert made.counters()["tree_missing"] == 20
            assert made.sizes() == {NS: 20}

    asyncio.run(scenario())


@pytest.mark.fault(16)
def test_processes_that_write_one_key_leave_one_whole_tree(valkey: EmbeddedValkey) -> None:
    code = f"""
        import asyncio, sys
        from tests.support.retrieving import NS, patient_service, prompt
        async def main():
            async with patient_service({valkey.url!r}) as made:
                for n in range(50):
                    assert await made.write_back(NS, prompt(0), [int(sys.argv[1]), n]) == "stored"
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]

    async def scenario() -> None:
        async with patient_service(valkey.url) as made:
            (tree,) = (await look(made, 0)).trees
            assert set(tree.tokens.tolist()) <= set(range(50))
            assert not any(name.startswith("tree_rejected") for name in made.counters())

    asyncio.run(scenario())


@pytest.mark.fault(26)
def test_formats_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade, old and new processes share a store and no namespace."""
    ours = namespace("tenant", "model", "tokenizer")
    # Its package exports a function of the same name, which hides the module from a dotted path.
    module = sys.modules["retrieval.namespace"]
    monkeypatch.setattr(module, "FORMAT_VERSION", codec.FORMAT_VERSION + 1)
    assert namespace("tenant", "model", "tokenizer") != ours
