"""A replica of two ranks on a real local Ray: its answers, and what is left when a part dies."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import ray
import torch
from ray import serve

from deployments.app import build_app
from deployments.settings import AppArgs
from tests.support.processes import Process, find
from tests.support.tiny_models import byte_tokenizer, tiny_model

pytestmark = pytest.mark.ray

PORT = 8767
ASK = {"prompt": "the sum of the sea", "max_tokens": 64, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """NAME=value in the environment of all processes of this Ray, and of no others."""
    return f"VALUSPEC_CACHE={tmp_path_factory.mktemp('ranks')}"


@pytest.fixture(scope="module")
def client(marker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = tmp_path_factory.mktemp("model")
    tiny_model("llama_bias").to(torch.bfloat16).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    args = AppArgs(
        model=str(model),
        served_model_name="tiny",
        tensor_parallel_size=2,
        num_threads=1,
        max_batch_size=2,
        retrieval=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*marker.split("="))
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(build_app(args), name="valuspec")
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=600) as client:
            yield client
        serve.shutdown()
        ray.shutdown()


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float = 600) -> None:
    """Polls, because nothing outside the app can be told."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=ASK | {"return_token_ids": True} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def token_ids(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def processes(marker: str) -> tuple[Process, Process]:
    """Rank 0 and the other; there are no more."""
    (leader,) = find("ray::ServeReplica:valuspec:Target", marker)
    (other,) = find("ray::Rank", marker)
    return leader, other


def test_answers_are_those_of_plain_decoding_in_fewer_steps(client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["exact"] is True
    for fields in ({}, {"temperature": 0.8, "seed": 11}):
        plain = complete(client, speculative={"enabled": False}, **fields)
        first, second = complete(client, **fields), complete(client, **fields)
        assert token_ids(plain) == token_ids(first) == token_ids(second)
        if not fields:
            steps = [
                answer["metrics"]["speculative_decoding"]["num_spec_steps"]
                for answer in (plain, second)
            ]
            assert steps[1] < steps[0] / 2


def stream(client: httpx.Client, at_first: Callable[[], None], **fields: Any) -> str:
    """The text of a streamed answer; `at_first` is called at its first piece."""
    text = ""
    with client.stream("POST", "/v1/completions", json=ASK | {"stream": True} | fields) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                if not text:
                    at_first()
                text += json.loads(line[6:])["choices"][0]["text"]
    assert line in ("data: [DONE]", "")
    return text


@pytest.mark.slow
@pytest.mark.fault(18)
def test_a_killed_rank_ends_its_replica_and_the_stream_goes_on_with_another(client, marker) -> None:
    long = {"max_tokens": 400, "speculative": {"enabled": False}}
    whole = complete(client, **long)["choices"][0]["text"]
    before = processes(marker)
    text = stream(client, lambda: before[1].signal(signal.SIGKILL), **long)
    assert text == whole
    assert not any(process.alive for process in before)
    after = processes(marker)
    assert {p.pid for p in after}.isdisjoint(p.pid for p in before)
    assert complete(client, **long)["choices"][0]["text"] == whole


@pytest.mark.slow
@pytest.mark.fault(23)
def test_an_idle_replica_notices_a_dead_rank(client, marker) -> None:
    expected = token_ids(complete(client))
    before = processes(marker)
    before[1].signal(signal.SIGKILL)
    wait_for("the health check", lambda: not before[0].alive)
    wait_for("another replica", lambda: client.get("/health").status_code == 200)
    assert token_ids(complete(client)) == expected


@pytest.mark.slow
@pytest.mark.fault(23)
def test_a_stopped_rank_is_noticed_and_its_stream_goes_on(client, marker) -> None:
    long = {"max_tokens": 400, "speculative": {"enabled": False}}
    whole = complete(client, **long)["choices"][0]["text"]
    before = processes(marker)
    assert stream(client, lambda: before[1].signal(signal.SIGSTOP), **long) == whole
    wait_for("the end of the stopped rank", lambda: not before[1].alive)


def test_no_rank_outlives_its_replica(client, marker) -> None:
    leader, other = processes(marker)
    leader.signal(signal.SIGKILL)
    wait_for("the end of its ranks", lambda: not other.alive)
