"""A store that wants another password: said once, with what to do, and counted; answers go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from redis import Redis

from deployments.preflight import check_store
from deployments.publishing import ReplicaReport
from deployments.retrieval import Retrieval
from deployments.settings import AppArgs
from deployments.store_errors import FORGET_AFTER_S, StoreErrors
from deployments.telemetry import Telemetry
from retrieval.embedded import EmbeddedValkey
from retrieval.store import StoreError
from retrieval.tenants import Owner
from tests.support.retrieving import NS, PATIENCE_S, prompt
from tests.support.servers import admin

REPORT = ReplicaReport("replica", "model", "v1", 0, "shipped", None)


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


def url(valkey: EmbeddedValkey, password: str) -> str:
    return valkey.url.replace("unix://", f"unix://:{password}@")


@pytest.mark.fault(4)
def test_it_is_said_once_and_retrieval_is_there_when_it_is_put_right(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(client: Redis) -> None:
        retrieval = Retrieval(AppArgs(redis_url=url(valkey, "wrong")))
        totals = retrieval._store_failed._telemetry.totals
        try:
            assert await retrieval.recent("model", 1000) == []
            assert (await retrieval.poll_thresholds(REPORT)).error == "auth"
            owner = Owner("tenant", "model", "tokenizer")
            assert await retrieval.write_back(owner, (1, 2), (3,)) == "error"
            found = await retrieval.lookup(NS, tuple(prompt(1)), 4, PATIENCE_S)
            assert found.outcome == "error"
            refused = totals()["valuspec_store_errors_auth"]
            assert refused >= 4
            client.config_set("requirepass", "wrong")  # the one we have
            found = await retrieval.lookup(NS, tuple(prompt(1)), 4, PATIENCE_S)
            assert found.outcome == "miss"
            assert totals()["valuspec_store_errors_auth"] == refused
        finally:
            await retrieval.__del__()

    with admin(valkey) as client:
        client.config_set("requirepass", "secret")
        with caplog.at_level(logging.ERROR):
            asyncio.run(scenario(client))
        client.config_set("requirepass", "")
    (said,) = [record.message for record in caplog.records if "refuses us" in record.message]
    assert "REDIS_URL" in said
    assert "secret" not in said
    assert "wrong@" not in said


def test_it_is_said_again_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    times = [0.0, 3.0, 6.0, 6.0 + FORGET_AFTER_S, 7.0 + 2 * FORGET_AFTER_S]
    failed = StoreErrors(Telemetry(), clock=iter(times).__next__)
    for _ in times:
        failed(StoreError("auth", "invalid username-password pair"))
        failed(StoreError("timeout", "too slow"))
    assert len(caplog.records) == 2
    assert failed._telemetry.totals() == {
        "valuspec_store_errors_auth": 5,
        "valuspec_store_errors_timeout": 5,
    }


@pytest.mark.parametrize(("password", "says"), [("wrong", "refuses us"), ("secret", "")])
def test_the_command_says_it_before_it_starts(
    valkey: EmbeddedValkey, capsys: pytest.CaptureFixture[str], password: str, says: str
) -> None:
    with admin(valkey) as client:
        client.config_set("requirepass", "secret")
        asyncio.run(check_store(url(valkey, password)))
        client.config_set("requirepass", "")
    said = capsys.readouterr().err
    assert says in said
    assert bool(said) == bool(says)
