"""The passes: every system in turn, a round of prompts at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from bench.peers.client import Worker, WorkerError, Workers
from bench.peers.plan import STREAMS, Cell, cells, rounds, turns
from bench.peers.results import Results, as_round
from bench.peers.systems import SYSTEMS, System
from bench.peers.workloads import Workload

TUNING_PROMPTS = 4
"""Calibration requests of each workload that settings are tried on."""
WARM_UP_TOKENS = 24


class Run:
    """Measures what is still missing in `results`."""

    def __init__(
        self,
        results: Results,
        workers: Workers,
        systems: Sequence[System],
        *,
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> None:
        self.results = results
        self.workers = workers
        self.systems = list(systems)
        self.limits = {"max_tokens": max_tokens, "stop_ids": list(stop_ids)}
        self._knows: dict[int, str] = {}
        """Workload whose earlier requests a worker holds, by the worker's id."""
        self._warm: set[tuple[int, str, int]] = set()

    def measure(self, workloads: Sequence[Workload]) -> None:
        groups = []
        for workload in workloads:
            self.results.data["prompts"][workload.name] = workload.categories
            for streams in STREAMS:
                group = cells(workload.name, streams, self.systems, len(workload.earlier))
                groups.append((workload, streams, group))
        total = sum(len(g) * len(rounds(len(w.prompts), s)) for w, s, g in groups)
        with tqdm(total=total, unit="round", file=sys.stderr) as bar:
            for workload, streams, group in groups:
                parts = rounds(len(workload.prompts), streams)
                for number, cell in turns(group, len(parts)):
                    bar.set_description(f"{cell.workload} x{streams} {cell.system}")
                    if not self.results.has(cell, number):
                        prompts = [workload.prompts[i] for i in parts[number]]
                        self._attempt(cell.system, self._round, cell, number, workload, prompts)
                    bar.update()

    def tune(self, workloads: Sequence[Workload]) -> None:
        """Find the best pass options of systems that have some, on calibration requests."""
        for system in self.systems:
            if system.tuned and system.name not in self.results.data["tuned"]:
                self._attempt(system.name, self._tune, system, workloads)
        self.results.save()

    def _tune(self, system: System, workloads: Sequence[Workload]) -> None:
        worker, _ = self.workers.of(system)
        prompts = [p for w in workloads for p, _ in w.calibration[:TUNING_PROMPTS]]
        self._warm_up(worker, system, dict(system.tuned[0]), prompts[:1], 1)
        tried = []
        for options in tqdm(system.tuned, desc=f"tuning {system.name}", file=sys.stderr):
            reply = worker.ask(
                "generate", prompts=prompts, streams=1, options=dict(options), **self.limits
            )
            speed = sum(map(len, reply["outputs"])) / sum(reply["seconds"])
            tried.append({**options, "tok_s": round(speed, 1)})
        best = max(zip(tried, system.tuned, strict=True), key=lambda pair: pair[0]["tok_s"])[1]
        self.results.data["tuned"][system.name] = {"best": dict(best), "tried": tried}

    def _round(self, cell: Cell, number: int, workload: Workload, prompts: list[list[int]]) -> None:
        """Measure one round of a cell, from the store it begins with."""
        system = SYSTEMS[cell.system]
        worker, _ = self.workers.of(system)
        options = dict(system.options) | self.results.data["tuned"].get(system.name, {}).get(
            "best", {}
        )
        if self._knows.get(id(worker)) != workload.name:
            worker.ask("history", earlier=workload.earlier, calibration=workload.calibration)
            self._knows[id(worker)] = workload.name
        if (id(worker), system.name, cell.streams) not in self._warm:
            worker.ask("stock", count=cell.store, options=options)
            first = [p for p, _ in workload.calibration[: cell.streams]]
            self._warm_up(worker, system, options, first, cell.streams)
        how = worker.ask("stock", count=cell.store, options=options)["how"]
        self.results.data["versions"] = self.workers.versions
        self.results.data.setdefault("stocked", {})[system.name] = how
        reply = worker.ask(
            "generate", prompts=prompts, streams=cell.streams, options=options, **self.limits
        )
        self.results.add(cell, number, as_round(reply))

    def _warm_up(
        self,
        worker: Worker,
        system: System,
        options: dict[str, Any],
        prompts: list[list[int]],
        streams: int,
    ) -> None:
        """Let caches and clocks settle on other requests, once for each kind of pass."""
        kind = (id(worker), system.name, streams)
        if kind not in self._warm:
            self._warm.add(kind)
            limits = self.limits | {"max_tokens": WARM_UP_TOKENS}
            worker.ask("generate", prompts=prompts, streams=streams, options=options, **limits)

    def _attempt(self, system: str, measure: Callable[..., None], *inputs: Any) -> None:
        """A system that fails is named, and left alone for the rest of the run."""
        failures = self.results.data["failures"]
        if system in failures:
            return
        try:
            measure(*inputs)
        except WorkerError as error:
            failures[system] = str(error)
            self.results.save()
            tqdm.write(f"{system}: {error}", file=sys.stderr)
