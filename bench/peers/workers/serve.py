"""The loop of every worker: a JSON object a line in, one out. Standard library only.

    {"op": "load", "model": PATH, "threads": N, "options": {}}        -> {"versions": {}}
    {"op": "history", "earlier": [[prompt, output], ...], "calibration": [...]}  -> {}
    {"op": "stock", "count": N, "options": {}}                        -> {"how": TEXT}
    {"op": "generate", "prompts": [[id, ...], ...], "streams": N, "max_tokens": N,
     "stop_ids": [id, ...], "options": {}}
        -> {"outputs": [[id, ...], ...], "seconds": [S, ...], "drafted": N, "accepted": N,
            "peak_bytes": N}

`history` gives the finished requests that stores may hold; `stock` empties the system's store and
puts the first N of them in; its options are those of the passes that follow. One stream is timed
prompt by prompt, several streams as a whole. A failed message is answered with {"error": TEXT};
the worker goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, Protocol

Request = tuple[list[int], list[int]]
"""Prompt and output token ids of a finished request."""


class System(Protocol):
    """What a worker wraps. `generate` returns outputs, and what its counters grew by."""

    def load(self, model: str, threads: int, **options: Any) -> dict[str, str]: ...

    def history(self, earlier: list[Request], calibration: list[Request]) -> None: ...

    def stock(self, count: int, **options: Any) -> str: ...

    def generate(
        self,
        prompts: list[list[int]],
        streams: int,
        max_tokens: int,
        stop_ids: list[int],
        **options: Any,
    ) -> tuple[list[list[int]], dict[str, int]]: ...


class Stateless:
    """A system without a store of earlier requests."""

    def history(self, earlier: list[Request], calibration: list[Request]) -> None:
        return

    def stock(self, count: int, **options: Any) -> str:
        return "keeps no earlier requests"


def answer(system: System, message: dict[str, Any]) -> dict[str, Any]:
    """The reply to one message."""
    match message.pop("op"):
        case "load":
            options = message.pop("options")
            return {"versions": system.load(**message, **options)}
        case "history":
            system.history(message["earlier"], message["calibration"])
            return {}
        case "stock":
            return {"how": system.stock(message["count"], **message["options"])}
        case "generate":
            return _timed(system, message)
        case other:
            raise ValueError(f"unknown op {other!r}")


def _timed(system: System, message: dict[str, Any]) -> dict[str, Any]:
    prompts, streams, options = (message.pop(k) for k in ("prompts", "streams", "options"))
    batches = [[p] for p in prompts] if streams == 1 else [prompts]
    outputs: list[list[int]] = []
    seconds: list[float] = []
    counted = {"drafted": 0, "accepted": 0}
    _forget_peak()
    for batch in batches:
        started = time.perf_counter()
        found, counters = system.generate(batch, streams, **message, **options)
        seconds.append(time.perf_counter() - started)
        outputs += [_without_stop(output, message["stop_ids"]) for output in found]
        for name, count in counters.items():
            counted[name] += count
    return {"outputs": outputs, "seconds": seconds, **counted, "peak_bytes": _peak_bytes()}


def _without_stop(output: list[int], stop_ids: list[int]) -> list[int]:
    """Libraries disagree on whether the stop token is part of the answer; here it is not."""
    return output[:-1] if output and output[-1] in stop_ids else output


def _forget_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # then the peak is that of the process's whole life


def _peak_bytes() -> int:
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def serve(system: System) -> None:
    """Answer messages until the input ends. What libraries print goes to the error output."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(system, json.loads(line))
        except Exception as error:  # noqa: BLE001  (the runner decides what a failure means)
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
