"""Tenant B asks what tenant A has asked: nothing B is told may show it.

Everything that remembers is real: engine, prefix cache, shared store, retrieval with Valkey and
FAISS, valuation, HTTP. Compared are all numbers of the answer that are no times: a tenant's view of
a server that others use is its view of one of its own.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.auth import ApiKeys
from deployments.gateway import create_app
from deployments.retrieval import Retrieval
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from deployments.valuation import Valuation
from retrieval.embedded import EmbeddedValkey
from retrieval.redis_store import RedisStore
from tests.support.engines import engine_of
from tests.support.fake_port import InProcessPort
from tests.support.retrieving import PATIENCE_S
from tests.support.tiny_models import tiny_target
from valuspec.drafting.drafter import Drafter

#: Longer than a block of the prefix cache.
PROMPT = "Of what one tenant asked, another must learn nothing. " * 4
TIMES = ("_ms", "tokens_per_second")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers late is an outcome too, but not one to compare."""
    store = partial(RedisStore, connect_timeout_s=PATIENCE_S, read_timeout_s=PATIENCE_S)
    monkeypatch.setattr("retrieval.redis_store.RedisStore", store)


class Handle:
    """A deployment's handle, with the deployment in this process."""

    def __init__(self, deployment: Any, method: str = "") -> None:
        self._deployment = deployment
        self._method = method

    def options(self, method_name: str) -> "Handle":
        return Handle(self._deployment, method_name)

    async def remote(self, *arguments: Any) -> Any:
        resolved = [await one if inspect.isawaitable(one) else one for one in arguments]
        return await getattr(self._deployment, self._method)(*resolved)


class Port(InProcessPort):
    """The real replica, asked without Ray."""

    def __init__(self, args: AppArgs, retrieval: Retrieval) -> None:
        target = tiny_target("llama")
        engine = engine_of(target, Drafter(), max_batch_size=2)
        self.valuation = Valuation()
        self.replica = TargetReplica(
            args, Handle(retrieval), Handle(self.valuation), load=lambda _: (target, engine)
        )
        self.ready = True


@contextmanager
def server() -> Iterator[Callable[..., dict[str, Any]]]:
    """A fresh server; yields `ask(key, **fields)`, which returns all that is not a time."""
    with EmbeddedValkey() as valkey:
        args = AppArgs(model="tiny", redis_url=valkey.url, retrieval_deadline_s=5)
        port = Port(args, Retrieval(args))
        keys = ApiKeys(["a:ka", "b:kb", "operator:ko"])
        with TestClient(create_app(port, args, keys)) as client:

            def ask(key: str, **fields: Any) -> dict[str, Any]:
                stored = num_stored(port)
                body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
                headers = {"authorization": f"Bearer {key}"}
                answer = client.post("/v1/completions", json=body | fields, headers=headers).json()
                # What this answer leaves behind must lie there before the next one is asked for.
                while num_stored(port) <= stored:
                    client.get("/health")
                return timeless(answer)

            yield ask
        port.replica._loop.stop()


def num_stored(port: Port) -> int:
    return port.replica._telemetry.totals().get("valuspec_write_back_stored", 0)


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: timeless(inner)
            for name, inner in value.items()
            if not name.endswith(TIMES) and name not in ("id", "created")
        }
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def steps(answer: dict[str, Any]) -> int:
    return answer["metrics"]["speculative_decoding"]["num_spec_steps"]


def test_another_tenants_requests_leave_no_trace() -> None:
    with server() as ask:
        cold = ask("kb")
        own = ask("kb")
    # The comparison below would notice: what one has asked oneself shows in every number.
    assert cold["choices"] == own["choices"]
    assert steps(own) < steps(cold)
    assert own["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert own["metrics"]["valuspec"]["retrieval_outcome"] == "hit"
    with server() as ask:
        for _ in range(2):
            ask("ka")
        assert ask("kb") == cold
        salted = ask("kb", cache_salt="only with equal salts")
        assert salted == cold, "nor does a tenant's own past, where it asks for that"


def test_the_comparison_would_notice_a_shared_namespace(monkeypatch) -> None:
    with server() as ask:
        cold = ask("kb")
    monkeypatch.setattr("retrieval.tenants.namespace", lambda tenant, *rest: "0" * 24)
    with server() as ask:
        ask("ka")
        assert ask("kb") != cold
