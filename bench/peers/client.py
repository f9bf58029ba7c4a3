"""Workers as processes: a question a line, an answer a line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.peers.environments import folder, python_of, variables_of
from bench.peers.systems import System

WORKERS = Path(__file__).parent / "workers"


class WorkerError(RuntimeError):
    """A worker refused a message, or is gone."""


class Worker:
    """One process. Its error output goes to a file, and its end into messages of failures."""

    def __init__(self, command: Sequence[str], variables: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._errors = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, env=variables,
        )  # fmt: skip

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """The reply to a message. Raises WorkerError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"op": op, **fields}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError as error:
            raise WorkerError(f"{op}: {error}; {self._last_words()}") from error
        if not line:
            raise WorkerError(f"{op}: the worker ended; {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{op}: {reply['error']}")
        return reply

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        return " | ".join(lines[-2:])[-300:]

    def close(self) -> None:
        """End the process, however it is."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what it was not alive to read
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class Workers:
    """The processes of a run, started when first asked; systems that can do so share one."""

    def __init__(self, model: Path, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._running: dict[tuple[str, str, str], Worker] = {}
        self.versions: dict[str, dict[str, str]] = {}
        """Versions of each worker's libraries, by environment."""

    def of(self, system: System) -> tuple[Worker, bool]:
        """The system's worker, and whether it was started for it. Raises WorkerError."""
        if system.process in self._running:
            return self._running[system.process], False
        try:
            python = python_of(system.environment)
        except subprocess.CalledProcessError as error:
            raise WorkerError(f"its environment cannot be made: {error}") from error
        worker = Worker(
            [str(python), str(WORKERS / f"{system.worker}.py")],
            variables_of(system.environment, self._threads),
            folder("logs") / f"{system.name}.log",
        )
        self._running[system.process] = worker
        reply = worker.ask(
            "load", model=str(self._model), threads=self._threads, options=dict(system.load)
        )
        self.versions.setdefault(system.environment or "valuspec", {}).update(reply["versions"])
        return worker, True

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._running.values():
            worker.close()
