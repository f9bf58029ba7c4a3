"""From one replica to two and back under load, on a real local Ray with a tiny model.

The app is deployed from a Serve configuration, as on a cluster, with the delays of production cut
short. `pytest -s` prints what docs/operations.md shows of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

import deployments
from retrieval.embedded import EmbeddedValkey
from tests.support.tiny_models import byte_tokenizer, tiny_model

pytestmark = pytest.mark.ray

PORT = 8766
NUM_CLIENTS = 6
PROMPTS = [f"{n}: the {word}" for n, word in enumerate(["fox of", "sea of", "sum", "art"] * 2)]
"""Greedy where they end in "of", else sampled with a seed."""
VARIABLES = {
    # Replicas report their load every ten seconds by default.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.3",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.3",
}


def configuration(model: Path, redis_url: str, min_replicas: int = 1) -> ServeDeploySchema:
    """deployments/serve.yaml, for this machine, a tiny model, and seconds instead of minutes."""
    path = Path(deployments.__file__).parent / "serve.yaml"
    config = yaml.safe_load(path.read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": PORT}
    (application,) = config["applications"]
    application["args"] |= {
        "model": str(model),
        "served_model_name": "tiny",
        "device": "cpu",
        "num_threads": 1,
        "max_batch_size": 2,
        "redis_url": redis_url,
        "log_dir": None,
    }
    for deployment in application["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0}
        if deployment["name"] == "Target":
            deployment["autoscaling_config"] |= {
                "min_replicas": min_replicas,
                "max_replicas": 2,
                "look_back_period_s": 1,
                "upscale_delay_s": 0.5,
                "downscale_delay_s": 2,
            }
        if deployment["name"] == "Gateway":
            deployment["num_replicas"] = 1
    return ServeDeploySchema.model_validate(config)


Deploy = Callable[[int], None]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Deploy]]:
    """A client, and a function that deploys with another least number of replicas."""
    folder = tmp_path_factory.mktemp("scaling")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    with pytest.MonkeyPatch.context() as patch, EmbeddedValkey() as valkey:
        for name, value in (VARIABLES | {"VALUSPEC_CACHE": str(folder / "cache")}).items():
            patch.setenv(name, value)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})

        def deploy(min_replicas: int) -> None:
            config = configuration(folder / "model", valkey.url, min_replicas)
            _get_global_client().deploy_apps(config)

        deploy(1)
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=600) as client:
            wait_for("the app", lambda: num_replicas() == 1 and healthy(client))
            yield client, deploy
        serve.shutdown()
        ray.shutdown()


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float = 600) -> None:
    """Polls, because nothing outside the app can be told."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.3)


def healthy(client: httpx.Client) -> bool:
    return client.get("/health").status_code == 200


def num_replicas() -> int:
    """Target replicas that take requests."""
    app = serve.status().applications["valuspec"]
    target = app.deployments.get("Target")
    return target.replica_states.get("RUNNING", 0) if target else 0


def ask(client: httpx.Client, prompt: str, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """Token ids, and how many of the prompt's were cached."""
    greedy = prompt.endswith("of")
    sampled = {"temperature": 0.0 if greedy else 0.7, "seed": 5}
    body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True} | sampled
    headers = {"x-session-id": fields.pop("session")} if "session" in fields else {}
    response = client.post(
        "/v1/completions", json=body | {"return_token_ids": True} | fields, headers=headers
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


class Load:
    """Clients that ask over and over until they are told to stop; a wrong answer raises."""

    def __init__(self, client: httpx.Client, expected: dict[str, list[int]]) -> None:
        self._client = client
        self._expected = expected
        self._wanted = 0
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._changed = threading.Condition()
        self.num_answers = 0
        self._clients = [self._pool.submit(self._ask_on, number) for number in range(NUM_CLIENTS)]

    def set(self, num_clients: int) -> None:
        with self._changed:
            self._wanted = num_clients
            self._changed.notify_all()

    def end(self) -> None:
        """Raise what any client has met."""
        self.set(-1)
        for one in self._clients:
            one.result()
        self._pool.shutdown()

    def _ask_on(self, number: int) -> None:
        turn = number
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted < 0 or number < self._wanted)
                if self._wanted < 0:
                    return
            prompt = PROMPTS[turn % len(PROMPTS)]
            assert ask(self._client, prompt)[0] == self._expected[prompt], prompt
            turn += 1
            with self._changed:
                self.num_answers += 1


def test_scaling_up_and_down_fails_and_changes_no_answer(app) -> None:
    client, deploy = app
    expected = {p: ask(client, p, speculative={"enabled": False})[0] for p in PROMPTS}
    load = Load(client, expected)
    started = time.monotonic()

    def record(event: str) -> None:
        seconds = time.monotonic() - started
        print(f"{seconds:6.1f} s  {event:<32}{num_replicas()} replicas, {load.num_answers} answers")

    try:
        record("one client")
        load.set(NUM_CLIENTS)
        record(f"{NUM_CLIENTS} clients")
        wait_for("a second replica", lambda: num_replicas() == 2)
        record("second replica takes requests")
        before = load.num_answers
        wait_for("answers of both", lambda: load.num_answers > before + 20)
        wait_for("what the new one has read", lambda: num_warmed() > 0)
        load.set(0)
        deploy(2)  # both stay while nobody else asks
        wait_for("idle replicas", lambda: sum(everywhere("num_requests_unfinished")) == 0)
        check_that_sessions_stay(client)
        deploy(1)
        load.set(1)
        record("one client")
        wait_for("one replica", lambda: num_replicas() == 1)
        record("second replica has drained")
        before = load.num_answers
        wait_for("answers of the one left", lambda: load.num_answers > before + 5)
    finally:
        load.end()
    record("end")


def everywhere(name: str) -> list[Any]:
    """One of the stats of every replica."""
    replies = serve.get_deployment_handle("Target", "valuspec").broadcast("stats")
    return [reply[name] for reply in replies.results(timeout_s=60)]


def num_warmed() -> int:
    """Stored answers that replicas knew before their first request."""
    return sum(totals.get("valuspec_warmed_answers", 0) for totals in everywhere("totals"))


def check_that_sessions_stay(client: httpx.Client) -> None:
    """Each session asks again and again, and finds its prompt where it has been computed."""
    for session in range(5):
        # Different beginnings, so that no other session has left them anywhere.
        prompt = f"{session} is what this session begins with. " + "Blocks are kept whole. " * 8
        cached = [ask(client, prompt, session=f"s{session}")[1]["cached_tokens"] for _ in range(3)]
        assert cached[0] == 0
        assert all(cached[1:]), cached
