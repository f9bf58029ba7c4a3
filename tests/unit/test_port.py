"""Errors of Serve's handles, as a client of the HTTP app sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from ray.serve.exceptions import BackPressureError

from deployments.auth import ApiKeys
from deployments.gateway import create_app
from deployments.messages import ModelCard
from deployments.port import HandlePort
from deployments.settings import AppArgs


class Failing:
    """A handle, its methods and their responses: all calls fail with one error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, method: str) -> Failing:
        return self

    def options(self, **_: Any) -> Failing:
        return self

    def remote(self, *_: Any) -> Failing:
        return self

    def cancel(self) -> None:
        raise self._error  # as Serve does of a call that reached no replica

    def __await__(self) -> Generator[Any, Any, Any]:
        raise self._error

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise self._error
        yield


def full_server(**settings: int) -> TestClient:
    """Of a server whose queues are full."""
    full = Failing(BackPressureError(num_queued_requests=8, max_queued_requests=8))
    port = HandlePort(full, full)
    port._card = ModelCard(
        name="m",
        max_model_len=128,
        exact=True,
        exact_mode="rows",
        dtype="bfloat16",
        model_fingerprint="f",
        loaded_at=0,
    )
    return TestClient(create_app(port, AppArgs(**settings), ApiKeys([])))


@pytest.fixture
def client() -> TestClient:
    return full_server()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/valuspec/filter", {"tokens": [5], "parents": [-1]}),
    ],
)
def test_a_full_queue_of_serve_is_a_429_of_ours(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")


def test_a_full_server_is_healthy(client: TestClient) -> None:
    assert client.get("/health").status_code == 200


def test_a_refusal_holds_for_others_only_where_it_would_be_theirs_too(client: TestClient) -> None:
    def holds(client: TestClient, **fields: Any) -> bool:
        response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1} | fields)
        assert response.status_code == 429
        return "x-valuspec-full" in response.headers

    assert holds(client)
    assert holds(client, stream=True)
    assert not holds(client, n=2), "there may be room for one"
    # A queue so short is empty before the refusal has passed.
    assert not holds(full_server(max_batch_size=8, max_waiting=7))
