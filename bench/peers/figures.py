"""Reads the tables' figures off the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from bench.peers.plan import WORKLOADS, Cell, rounds
from bench.peers.results import Figures
from bench.peers.systems import OURS, SYSTEMS, System

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem",
            "humanities"}  # fmt: skip


class Book:
    """Figures by cell. Only prompts that all systems of a column answered should be compared: a
    run that was stopped early says so on the page."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self._cells = {Cell.of(key): found for key, found in data["cells"].items()}
        self._figures = {cell: Figures.of(found) for cell, found in self._cells.items()}

    @property
    def workloads(self) -> list[str]:
        return [w for w in WORKLOADS if any(c.workload == w for c in self._cells)]

    def systems(self, *, part: bool = False) -> list[System]:
        there = {cell.system for cell in self._cells}
        return [s for s in SYSTEMS.values() if s.name in there and s.part == part]

    def stores(self, workload: str, streams: int, system: str) -> list[int]:
        found = {
            c.store
            for c in self._cells
            if (c.workload, c.streams, c.system) == (workload, streams, system)
        }
        return sorted(found)

    def at(self, workload: str, streams: int, system: str, store: int) -> Figures | None:
        return self._figures.get(Cell(workload, streams, system, store))

    def warm(self, workload: str, streams: int, system: str) -> Figures | None:
        """With all earlier requests known; systems that keep none as they are."""
        stores = self.stores(workload, streams, system)
        return self.at(workload, streams, system, stores[-1]) if stores else None

    def plain(self, workload: str, streams: int, system: str) -> Figures | None:
        return self.at(workload, streams, SYSTEMS[system].plain, 0)

    def best_plain(self, workload: str, streams: int) -> tuple[str, float] | None:
        """The fastest plain decoding of all systems: (name, tokens per second)."""
        speeds = [
            (name, found.tok_s)
            for name in dict.fromkeys(s.plain for s in SYSTEMS.values())
            if (found := self.at(workload, streams, name, 0)) is not None
        ]
        return max(speeds, key=lambda pair: pair[1]) if speeds else None

    def identical(self, workload: str, streams: int, system: str) -> float | None:
        """Share of answers that are the system's own plain answers of one stream."""
        reference = self.plain(workload, 1, system)
        found = self.warm(workload, streams, system)
        return found.identical(reference) if found and reference else None

    def missing(self) -> int:
        """Rounds that were begun elsewhere and are not there for a cell."""
        gaps = 0
        for cell, found in self._cells.items():
            wanted = len(rounds(len(self.data["prompts"][cell.workload]), cell.streams))
            gaps += wanted - sum(r is not None for r in found)
        return gaps

    def losses(self) -> list[tuple[str, int, str, float]]:
        """(workload, streams, system, its speed over ours) where a system is faster than ours."""
        found = []
        for streams in (1, 8):
            for workload in self.workloads:
                ours = self.warm(workload, streams, OURS)
                for system in self.systems():
                    other = self.warm(workload, streams, system.name)
                    if ours and other and system.name != OURS and other.tok_s > ours.tok_s:
                        found.append((workload, streams, system.name, other.tok_s / ours.tok_s))
        return found

    def by_task(self, system: str) -> dict[str, float]:
        """Tokens per second in each Spec-Bench task, one stream."""
        stores = self.stores("specbench", 1, system)
        if not stores:
            return {}
        categories = self.data["prompts"]["specbench"]
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        parts = rounds(len(categories), 1)
        cell = Cell("specbench", 1, system, stores[-1])
        for part, found in zip(parts, self._cells[cell], strict=False):
            for index, tokens, seconds in _answers(part, found):
                task = "multi-turn" if categories[index] in MT_BENCH else categories[index]
                sums[task][0] += tokens
                sums[task][1] += seconds
        return {task: tokens / seconds for task, (tokens, seconds) in sorted(sums.items())}


def _answers(part: range, found: dict[str, Any] | None) -> Iterable[tuple[int, int, float]]:
    return [] if found is None else zip(part, found["tokens"], found["seconds"], strict=True)
