"""What was measured: one JSON file, which is also what an interrupted run goes on from.

    about     machine, commands, settings
    versions  by environment
    tuned     pass options found best on calibration requests, and what else was tried
    failures  by system: why it could not be measured (further)
    prompts   by workload: category of each test request
    cells     by `Cell.key`: a list of rounds; null where one is still to come

A round holds the tokens and a digest of each answer, the seconds (one stream: of each answer;
several: one figure), draft tokens verified and accepted, and the process's peak memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.plan import Cell

Round = dict[str, Any]


def digest(token_ids: Sequence[int]) -> str:
    """Eight hex digits that tell answers apart."""
    text = ",".join(map(str, token_ids))
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()


def as_round(reply: dict[str, Any]) -> Round:
    """A worker's reply to `generate`, without the answers themselves."""
    return {
        "tokens": [len(output) for output in reply["outputs"]],
        "answers": [digest(output) for output in reply["outputs"]],
        "seconds": [round(s, 4) for s in reply["seconds"]],
        "drafted": reply["drafted"],
        "accepted": reply["accepted"],
        "peak_mb": round(reply["peak_bytes"] / 1e6),
    }


@dataclass(slots=True)
class Results:
    """The content of the file. `save` after every round: it replaces the file at once or not."""

    path: Path
    data: dict[str, Any]

    @classmethod
    def open(cls, path: Path, about: dict[str, Any]) -> Results:
        """Go on from a file, or begin one. Raises ValueError if it was made with other settings."""
        empty: dict[str, Any] = {
            "about": about, "versions": {}, "tuned": {}, "failures": {}, "prompts": {}, "cells": {},
        }  # fmt: skip
        if not path.is_file():
            return cls(path, empty)
        found: dict[str, Any] = json.loads(path.read_text())
        if found["about"]["settings"] != about["settings"]:
            raise ValueError(
                f"{path} was measured with {found['about']['settings']}, not {about['settings']}; "
                "name another file or remove it"
            )
        found["failures"] = {}  # what failed is tried again
        if about["revision"] not in found["about"]["revision"].split(", "):
            found["about"]["revision"] += ", " + about["revision"]
        return cls(path, found)

    def has(self, cell: Cell, number: int) -> bool:
        rounds = self.data["cells"].get(cell.key, [])
        return number < len(rounds) and rounds[number] is not None

    def add(self, cell: Cell, number: int, measured: Round) -> None:
        rounds = self.data["cells"].setdefault(cell.key, [])
        rounds += [None] * (number + 1 - len(rounds))
        rounds[number] = measured
        self.save()

    def save(self) -> None:
        partial = self.path.with_suffix(".tmp")
        partial.write_text(_one_round_a_line(self.data) + "\n")
        os.replace(partial, self.path)


def _one_round_a_line(data: dict[str, Any]) -> str:
    head = [f'"{k}": {json.dumps(v, sort_keys=True)}' for k, v in data.items() if k != "cells"]
    cells = [
        json.dumps(key) + ": [\n" + ",\n".join(map(json.dumps, rounds)) + "]"
        for key, rounds in sorted(data["cells"].items())
    ]
    return "{" + ",\n".join([*head, '"cells": {' + ",\n".join(cells) + "}"]) + "}"


@dataclass(frozen=True, slots=True)
class Figures:
    """A cell's figures over the rounds that are there."""

    tokens: int
    answers: tuple[str, ...]
    seconds: float
    drafted: int
    accepted: int
    peak_mb: int

    @classmethod
    def of(cls, rounds: Iterable[Round | None]) -> Figures | None:
        """None where nothing was measured."""
        done = [r for r in rounds if r is not None]
        if not done:
            return None
        return cls(
            sum(sum(r["tokens"]) for r in done),
            tuple(a for r in done for a in r["answers"]),
            sum(sum(r["seconds"]) for r in done),
            sum(r["drafted"] for r in done),
            sum(r["accepted"] for r in done),
            max(r["peak_mb"] for r in done),
        )

    @property
    def tok_s(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, its bonus token included; the first of an answer comes of no step."""
        later = self.tokens - len(self.answers)
        return later / max(1, later - self.accepted)

    @property
    def drafted_per_accepted(self) -> float | None:
        return self.drafted / self.accepted if self.accepted else None

    def identical(self, other: Figures) -> float:
        """Share of answers equal to the other's."""
        pairs = list(zip(self.answers, other.answers, strict=False))
        return sum(a == b for a, b in pairs) / len(pairs)
