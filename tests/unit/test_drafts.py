import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments import drafts
from deployments.drafts import DraftStore, RetrievedDrafts
from deployments.messages import RetrievalReport
from deployments.telemetry import Telemetry
from valuspec.tree import DraftTree


class Handle:
    """A deployment handle that runs `call(method, *args)` here."""

    def __init__(self, call: Callable[..., Any], method: str = "") -> None:
        self._call = call
        self._method = method

    def options(self, method_name: str) -> "Handle":
        return Handle(self._call, method_name)

    def remote(self, *args: Any) -> Any:
        return self._call(self._method, *args)


async def prune_nothing(method: str, found: Any, model_fingerprint: str) -> RetrievedDrafts:
    assert (method, model_fingerprint) == ("prune", "model")
    return await found


def store(telemetry: Telemetry, retrieval, valuation=prune_nothing) -> DraftStore:
    return DraftStore(
        Handle(retrieval),
        Handle(valuation),
        telemetry,
        model_fingerprint="model",
        vocab_size=100,
        k=4,
        deadline_s=0.05,
    )


def look_up(telemetry: Telemetry, retrieval, valuation=prune_nothing):
    async def run():
        report = RetrievalReport()
        trees = await store(telemetry, retrieval, valuation).lookup("ns", [1, 2], report)
        return trees, report

    return asyncio.run(run())


def found(*trees: DraftTree, outcome: str = "hit"):
    async def lookup(method, namespace, prompt_ids, k, deadline_s):
        assert (method, namespace, prompt_ids, k, deadline_s) == ("lookup", "ns", (1, 2), 4, 0.05)
        return RetrievedDrafts(list(trees), outcome, num_stored_nodes=9, valuation_s=0.001)

    return lookup


def test_a_hit_is_reported_and_counted() -> None:
    telemetry = Telemetry()
    tree = DraftTree.from_paths([[1, 2, 3]])
    trees, report = look_up(telemetry, found(tree))
    assert [t.tokens.tolist() for t in trees] == [[1, 2, 3]]
    assert (report.outcome, report.num_trees) == ("hit", 1)
    assert (report.num_stored_nodes, report.num_nodes) == (9, 3)
    assert telemetry.totals() == {"valuspec_retrieval_requests_hit": 1}


def test_trees_beyond_the_vocabulary_never_reach_the_engine() -> None:
    telemetry = Telemetry()
    good, foreign = DraftTree.from_paths([[99]]), DraftTree.from_paths([[100]])
    cyclic = DraftTree.from_lists([1, 2], [1, 0])
    trees, report = look_up(telemetry, found(foreign, good, cyclic))
    assert [t.tokens.tolist() for t in trees] == [[99]]
    assert report.num_trees == 1
    assert telemetry.totals()["valuspec_trees_refused"] == 2


async def dies(*_: Any) -> Any:
    raise RuntimeError("actor died")


async def hangs(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("dead", ["retrieval", "valuation"])
def test_a_dead_deployment_is_an_outcome(dead) -> None:
    telemetry = Telemetry()
    broken = {"retrieval": found(), "valuation": prune_nothing} | {dead: dies}
    trees, report = look_up(telemetry, **broken)
    assert (trees, report.outcome) == ([], "error")
    assert telemetry.totals() == {"valuspec_retrieval_requests_error": 1}


def test_a_lookup_that_the_answer_did_not_wait_for_is_late() -> None:
    async def run() -> RetrievalReport:
        report = RetrievalReport()
        waiting = asyncio.create_task(store(Telemetry(), hangs).lookup("ns", (1, 2), report))
        await asyncio.sleep(0)
        waiting.cancel()
        return report

    assert asyncio.run(run()).outcome == "late"


def test_a_hung_deployment_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(drafts, "PATIENCE_S", 0.01)
    trees, report = look_up(Telemetry(), hangs)
    assert (trees, report.outcome) == ([], "timeout")


class WatchedTelemetry(Telemetry):
    """Sets `all_ended` once three writes have an outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.all_ended = asyncio.Event()

    def count(self, name: str, amount: float = 1, **tags: str) -> None:
        super().count(name, amount, **tags)
        outcomes = ("stored", "error")
        ended = sum(self.totals().get(f"valuspec_write_back_{o}", 0) for o in outcomes)
        if ended == 3:
            self.all_ended.set()


def test_writes_are_stored_in_order_dropped_when_too_many_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(drafts, "MAX_PENDING_WRITES", 3)
    written: list[int] = []

    async def write(method, namespace, prompt_ids, output_ids):
        assert (method, namespace, prompt_ids) == ("write_back", "ns", (1,))
        written.append(output_ids[0])
        if output_ids[0] == 1:
            raise RuntimeError("store is gone")
        return "stored"

    async def run() -> WatchedTelemetry:
        telemetry = WatchedTelemetry()
        writes = store(telemetry, write)
        for number in range(5):  # the writer has had no turn yet
            writes.write_back("ns", (1,), (number,))
        await asyncio.wait_for(telemetry.all_ended.wait(), 10)
        return telemetry

    totals = asyncio.run(run()).totals()
    assert written == [0, 1, 2]
    assert totals == {
        "valuspec_write_back_dropped": 2,
        "valuspec_write_back_error": 1,
        "valuspec_write_back_stored": 2,
    }
