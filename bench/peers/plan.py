"""Which passes there are: every system of a workload in turn, a round of prompts at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.peers.systems import CURVE, System

WORKLOADS = ("humaneval", "gsm8k", "dolly", "specbench", "spider", "banking77", "extraction",
             "bfcl", "mbpp", "infilling", "tau_agent")  # fmt: skip
CLOSE_LOOK = ("humaneval", "gsm8k", "spider")
"""Workloads with a learning curve and an ablation."""
CURVE_POINTS = (25, 50, 100, 200)
"""Earlier requests, besides none and all."""
STREAMS = (1, 8)


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of the tables: a system at a workload, with so many earlier requests."""

    workload: str
    streams: int
    system: str
    store: int

    @property
    def key(self) -> str:
        return f"{self.workload}/{self.streams}/{self.system}/{self.store}"

    @classmethod
    def of(cls, key: str) -> Cell:
        workload, streams, system, store = key.split("/")
        return cls(workload, int(streams), system, int(store))


def cells(workload: str, streams: int, systems: Sequence[System], history: int) -> list[Cell]:
    """What is measured of a workload with `history` earlier requests at hand.

    Systems that keep no earlier requests are measured once, with none.
    """
    found = []
    for system in systems:
        if streams not in system.streams or (system.part and workload not in CLOSE_LOOK):
            continue
        stores = [0, history] if system.learns else [0]
        if system.part:
            stores = [history]
        elif system.name in CURVE and streams == 1 and workload in CLOSE_LOOK:
            stores = [0, *(n for n in CURVE_POINTS if n < history), history]
        found += [Cell(workload, streams, system.name, n) for n in dict.fromkeys(stores)]
    return found


def rounds(num_prompts: int, streams: int) -> list[range]:
    """Prompts that a system answers before the next one takes its turn.

    Several streams get twice as many prompts as streams, so places are filled again.
    """
    size = 8 if streams == 1 else 2 * streams
    return [range(i, min(i + size, num_prompts)) for i in range(0, num_prompts, size)]


def turns(group: Sequence[Cell], num_rounds: int) -> Iterator[tuple[int, Cell]]:
    """(round, cell) in order; each round begins with another cell."""
    for number in range(num_rounds):
        shift = number % len(group) if group else 0
        for cell in [*group[shift:], *group[:shift]]:
            yield number, cell
