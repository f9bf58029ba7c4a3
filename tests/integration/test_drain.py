"""`valuspec serve` told to stop while it answers: the real command, a real Ray, a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.ports import free_port
from tests.faults.site import save_tiny_model, wait_for
from tests.support.processes import find

pytestmark = pytest.mark.ray

#: Takes seconds: long enough for a signal in its midst.
LONG = {"prompt": "once", "max_tokens": 600, "temperature": 0, "ignore_eos": True}


class Command:
    """A running `valuspec serve` in a process group of its own, as a shell would start it."""

    def __init__(self, folder: Path, *options: str) -> None:
        save_tiny_model(folder / "model")
        self._marker = f"VALUSPEC_CACHE={folder}"
        port = free_port()
        command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port)]
        model = ["--model", str(folder / "model"), "--num-threads", "1"]
        self.process = subprocess.Popen(
            [*command, *model, *options],
            env=os.environ | {"VALUSPEC_CACHE": str(folder)},
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert any(line.startswith("==> serving") for line in self.process.stdout), "it ended"

    def health(self) -> int | None:
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get("/health").status_code
        return None

    def stream(self, once_begun: Callable[[], object]) -> Iterator[str]:
        """The text of LONG piece by piece; ends at [DONE] only."""
        body = LONG | {"stream": True, "speculative": {"enabled": False}}
        begun = False
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield event["choices"][0]["text"]
                    if not begun:
                        begun = True
                        once_begun()
        raise AssertionError("the stream ended without [DONE]")

    def processes_left(self) -> list[Any]:
        return find("", self._marker)


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Command]:
    command = Command(folder, *options)
    try:
        command.wait_until_ready()
        yield command
    finally:
        command.client.close()
        for process in command.processes_left():
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGKILL)
        command.process.communicate()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """One request at a time, and none may wait. The last test that uses it stops it."""
    full = ["--max-batch-size", "1", "--max-waiting", "0"]
    with serving(tmp_path_factory.mktemp("small"), *full, "--drain-timeout", "600") as command:
        yield command


@pytest.mark.fault(51)
def test_whoever_refuses_does_it_in_our_form(small: Command) -> None:
    """The replica, or the queue in front of it: with so many at once it takes both."""
    responses: list[httpx.Response] = []

    def flood() -> None:
        async def ask_all() -> None:
            async with httpx.AsyncClient(base_url=small.client.base_url, timeout=120) as client:
                asked = [client.post("/v1/completions", json=LONG) for _ in range(64)]
                responses.extend(await asyncio.gather(*asked))

        asyncio.run(ask_all())

    "".join(small.stream(flood))
    refused = [response for response in responses if response.status_code != 200]
    assert len(refused) > 50, "a few came when the stream had ended"
    for response in refused:
        assert response.status_code == 429, response.text
        assert response.json()["error"]["code"] == "overloaded"
        assert int(response.headers["retry-after"]) > 0


@pytest.mark.fault(19)
def test_running_answers_end_and_new_ones_are_refused(small: Command) -> None:
    whole = small.client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
    refused: list[httpx.Response] = []

    def stop() -> None:
        # As Ctrl-C in a terminal does: every process of the group gets the signal.
        os.killpg(small.process.pid, signal.SIGINT)
        wait_for("being drained", lambda: small.health() == 503)
        refused.append(small.client.post("/v1/completions", json=LONG))

    assert "".join(small.stream(stop)) == whole
    (response,) = refused
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    assert int(response.headers["retry-after"]) > 0
    assert small.process.wait(120) == 0
    assert small.processes_left() == []


@pytest.mark.slow
@pytest.mark.fault(19)
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "600") as command:
        told_at = 0.0

        def stop() -> None:
            nonlocal told_at
            command.process.send_signal(signal.SIGTERM)
            wait_for("being drained", lambda: command.health() == 503)
            command.process.send_signal(signal.SIGTERM)
            told_at = time.monotonic()

        with pytest.raises(httpx.HTTPError):
            list(command.stream(stop))
        assert command.process.wait(120) == 0
        assert time.monotonic() - told_at < 60, "a tenth of the timeout it had"
        assert command.processes_left() == []
