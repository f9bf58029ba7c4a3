"""The whole app on a real local Ray, with a real Valkey and the real built-in model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from deployments.app import build_app
from deployments.commands.serve import SERVE_ENVIRONMENT
from deployments.settings import AppArgs
from retrieval.embedded import EmbeddedValkey
from retrieval.threshold_store import ThresholdStore
from tests.support.publishing import publish
from tests.support.threshold_sets import set_like_shipped

pytestmark = pytest.mark.ray

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"
QUESTION = [{"role": "user", "content": "Write three short sentences about a red fox."}]
PLAIN = {"enabled": False}
#: One call can fill the app.
MAX_WAITING = 32


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture(scope="module")
def app(valkey: EmbeddedValkey) -> Iterator[None]:
    """One app for all tests here, as `valuspec serve` runs it; the last ones break parts of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVE_ENVIRONMENT.items():
            patch.setenv(name, value)
        # All processes of Ray inherit it.
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(build_app(AppArgs(redis_url=valkey.url, max_waiting=MAX_WAITING)), name="valuspec")
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def client(app: None) -> Iterator[httpx.Client]:
    # A single deadline for the whole file: a busy machine is slow, a hung one is stuck.
    with httpx.Client(base_url=URL, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(app: None) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120, max_retries=0)


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "max_tokens": 48, "temperature": 0, "return_token_ids": True}
    response = client.post("/v1/chat/completions", json=body | fields)
    assert response.status_code == 200, response.text
    return response.json()


def token_ids(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def num_steps(answer: dict[str, Any]) -> int:
    return answer["metrics"]["speculative_decoding"]["num_spec_steps"]


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float = 60) -> float:
    """Seconds until `holds()`; polls, because nothing outside the app can be told."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


def totals(client: httpx.Client) -> dict[str, int]:
    return client.get("/v1/valuspec/stats").json()["totals"]


def replica(deployment: str) -> Any:
    """Handle of a deployment's only replica actor."""
    prefix = f"SERVE_REPLICA::valuspec#{deployment}#"
    (actor,) = (
        a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith(prefix)
    )
    return ray.get_actor(actor["name"], namespace=actor["namespace"])


# -- refusals


def test_under_a_flood_the_proxy_repeats_a_refusal(client) -> None:
    """What comes next is refused before it is looked at, even with a body that makes no sense."""
    ask = {"prompt": "Once upon a time", "max_tokens": 512, "temperature": 0, "ignore_eos": True}
    filling = ask | {"n": AppArgs().max_batch_size + MAX_WAITING, "stream": True}

    def both() -> list[int]:
        return [client.post("/v1/completions", json=b).status_code for b in (ask, {"prompt": 3.5})]

    with client.stream("POST", "/v1/completions", json=filling) as stream:
        lines = stream.iter_lines()  # kept: the stream is closed with its iterator
        next(lines)
        wait_for("a repeated refusal", lambda: both() == [429, 429])
        assert client.get("/v1/models").status_code == 200
    wait_for("an answer", lambda: both() == [200, 400])


# -- answers


def test_the_model_is_ready_and_exact(client) -> None:
    assert client.get("/health").status_code == 200
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "smollm2"
    assert model["exact"] is True
    assert model["exact_mode"] in ("rows", "envelope")


def test_the_second_time_takes_fewer_steps_for_the_same_tokens(client) -> None:
    plain = chat(client, speculative=PLAIN)
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    stored = totals(client).get("valuspec_write_back_stored", 0)
    first = chat(client)
    wait_for("write-back", lambda: totals(client)["valuspec_write_back_stored"] > stored)
    second = chat(client)
    assert token_ids(plain) == token_ids(first) == token_ids(second)
    assert num_steps(second) < num_steps(plain) / 2
    assert second["metrics"]["valuspec"]["retrieval_outcome"] == "hit"
    assert second["metrics"]["valuspec"]["num_retrieved_nodes_kept"] > 0


def test_a_client_that_leaves_disturbs_nobody(client) -> None:
    """Not those who came beside it, nor those who come after it."""
    body = {"messages": QUESTION, "max_tokens": 48, "temperature": 0, "stream": True}
    whole = chat(client)
    beside = client.build_request(
        "POST", "/v1/chat/completions", json=body | {"return_token_ids": True}
    )
    for _ in range(2):
        long = body | {"max_tokens": 1000, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=long) as leaving:
            next(leaving.iter_lines())
            response = client.send(beside, stream=True)
            lines = response.iter_lines()
            first = next(lines)
        events = [line for line in [first, *lines] if line.startswith("data: {")]
        response.close()
        ids = [
            i for e in events for c in json.loads(e[6:])["choices"] for i in c.get("token_ids", ())
        ]
        assert ids == token_ids(whole)
        assert token_ids(chat(client)) == token_ids(whole)


def test_sampling_with_a_seed_is_identical_too(client) -> None:
    sampled = {"temperature": 0.8, "seed": 11, "top_p": 0.95}
    plain = chat(client, speculative=PLAIN, **sampled)
    assert token_ids(plain) == token_ids(chat(client, **sampled))
    assert token_ids(plain) != token_ids(chat(client, **sampled | {"seed": 12}))


def test_streamed_text_is_the_whole_text_on_both_routes(client) -> None:
    for route, body in (
        ("/v1/chat/completions", {"messages": QUESTION}),
        ("/v1/completions", {"prompt": "The quick brown fox"}),
    ):
        body |= {"max_tokens": 24, "temperature": 0}
        whole = client.post(route, json=body).json()
        stream = body | {"stream": True, "stream_options": {"include_usage": True}}
        lines = client.post(route, json=stream).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        text = "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in choices)
        (choice,) = whole["choices"]
        assert text == (choice.get("text") or choice["message"]["content"])
        assert choices[-1]["finish_reason"] == choice["finish_reason"]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_token_ids_and_text_are_the_same_prompt(client) -> None:
    ids = client.post("/tokenize", json={"prompt": "def add(a, b):"}).json()["tokens"]
    body = {"max_tokens": 16, "temperature": 0}
    by_text = client.post("/v1/completions", json=body | {"prompt": "def add(a, b):"}).json()
    by_ids = client.post("/v1/completions", json=body | {"prompt": ids}).json()
    both = client.post("/v1/completions", json=body | {"prompt": [ids, ids]}).json()
    texts = {c["text"] for answer in (by_text, by_ids, both) for c in answer["choices"]}
    assert len(texts) == 1
    assert both["usage"]["prompt_tokens"] == 2 * len(ids)


def test_openai_client(openai_client) -> None:
    assert [m.id for m in openai_client.models.list()] == ["smollm2"]
    ask = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = openai_client.chat.completions.create(**ask)
    chunks = list(
        openai_client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    completion = openai_client.completions.create(model="smollm2", prompt="Once", max_tokens=4)
    assert completion.usage.completion_tokens == 4


def test_openai_client_sees_typed_errors(openai_client) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.chat.completions.create(model="other", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.completions.create(model="smollm2", prompt="word " * 20_000, max_tokens=4)
    assert too_long.value.code == "context_length_exceeded"
    assert "8192" in str(too_long.value)
    with pytest.raises(openai.BadRequestError) as unsupported:
        openai_client.chat.completions.create(
            model="smollm2", messages=QUESTION, logit_bias={"5": 1}
        )
    assert unsupported.value.param == "logit_bias"


def test_request_id_comes_back_once(client) -> None:
    response = client.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert response.headers.get_list("x-request-id") == ["abc-1"]


# -- threshold sets


def thresholds(client: httpx.Client) -> dict[str, Any]:
    return client.get("/v1/valuspec/thresholds").json()


def test_a_published_set_reaches_the_replicas_without_restart_or_change_of_bytes(
    client, valkey
) -> None:
    before = chat(client)
    shown = thresholds(client)
    assert shown["active"]["origin"] == "shipped"
    assert shown["store"]["error"] is None
    made = set_like_shipped(shown["model_fingerprint"], "published")

    async def publish_it() -> None:
        store = ThresholdStore.at(valkey.url)
        try:
            await publish(store, made, reason="for a test")
        finally:
            await store.aclose()

    started = client.get("/v1/models").json()["data"][0]["created"]
    asyncio.run(publish_it())
    # The valuation deployment follows the same pointer, and reports like a replica.
    wait_for(
        "every deployment",
        lambda: (
            [r["version"] for r in thresholds(client)["store"]["replicas"]] == [made.version] * 2
        ),
    )
    shown = thresholds(client)
    assert (shown["active"]["version"], shown["active"]["revision"]) == (made.version, 1)
    assert shown["store"]["num_versions"] == 1
    assert shown["events"][-1]["reason"] == "revision 1: for a test"
    after = chat(client)
    assert token_ids(after) == token_ids(before)
    assert after["metrics"]["valuspec"]["threshold_version"] == made.version
    assert client.get("/v1/models").json()["data"][0]["created"] == started
    assert client.post("/v1/valuspec/filter", json={"tokens": [5], "parents": [-1]}).json()[
        "threshold_version"
    ] == (made.version)


# -- clients that go away


@pytest.mark.fault(48)
def test_a_closed_stream_frees_its_slot(client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: httpx closes the stream with its iterator
        next(lines)
        assert client.get("/v1/valuspec/stats").json()["num_requests_running"] == 1
    wait_for("slot", lambda: client.get("/v1/valuspec/stats").json()["num_requests_running"] == 0)


@pytest.mark.fault(48)
def test_an_abandoned_whole_answer_frees_its_slot(client) -> None:
    before = totals(client).get("valuspec_request_success_abort", 0)
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=1)
    wait_for("abort", lambda: totals(client).get("valuspec_request_success_abort", 0) == before + 1)
    wait_for("slot", lambda: client.get("/v1/valuspec/stats").json()["num_requests_running"] == 0)


# -- parts that break, in this order


@pytest.mark.fault(1)
def test_valkey_killed_in_mid_stream_changes_no_byte(client, valkey) -> None:
    ask = {"messages": QUESTION, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    plain = client.post("/v1/chat/completions", json=ask | {"speculative": PLAIN}).json()
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=ask | {"stream": True}) as response:
        for line in response.iter_lines():
            if '"content":' in line and not text:
                os.kill(valkey.pid, signal.SIGKILL)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    assert line in ("data: [DONE]", "")
    assert text == plain["choices"][0]["message"]["content"]
    # Without a store, new requests are answered, by other draft sources, with the same tokens.
    after = chat(client, max_tokens=200, ignore_eos=True)
    assert after["choices"][0]["message"]["content"] == text
    assert after["metrics"]["valuspec"]["retrieval_outcome"] in ("error", "open", "timeout")
    failed = [name for name in totals(client) if name.startswith("valuspec_retrieval_requests_")]
    assert {n.rpartition("_")[2] for n in failed} & {"error", "open", "timeout"}


def test_retrieval_and_valuation_killed_change_no_byte(client) -> None:
    plain = chat(client, speculative=PLAIN)
    for deployment in ("Retrieval", "Valuation"):
        ray.kill(replica(deployment))
        assert token_ids(chat(client)) == token_ids(plain)


@pytest.mark.fault(18)
def test_a_killed_replica_is_replaced_and_its_stream_goes_on(client) -> None:
    """It was the only one: the stream pauses until there is another."""
    ask = {"prompt": "Once upon a time", "max_tokens": 160, "temperature": 0, "ignore_eos": True}
    whole = client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    text, killed = "", False
    with client.stream("POST", "/v1/completions", json=ask | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if not killed:
                    ray.kill(replica("Target"))
                    killed = True
    assert line in ("data: [DONE]", "")
    assert text == whole
