"""What a replica logs, of whom, and that neither the log nor costs can hurt a request."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deployments import replica_log
from deployments.local_costs import REFRESH_S, LocalCosts
from deployments.messages import GenerateCall
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from retrieval.namespace import namespace
from retrieval.trajectory_log import LoggedTrajectory, LogLimits, read_log, writer
from tests.support.fake_engine import FakeEngine, FakeTarget
from valuspec.cost import MIN_STEPS, CostStaircase, LiveCosts
from valuspec.engine.types import SamplingParams

COST = CostStaircase((1, 4, 16), (0.02, 0.024, 0.04))


@contextmanager
def replica(engine: FakeEngine, **settings: Any) -> Iterator[TargetReplica]:
    """A replica that logs; on exit everything has been written."""
    args = AppArgs(model="fake", **settings)
    replica = TargetReplica(args, None, None, load=lambda _: (engine.target, engine))
    yield replica
    replica.__del__()


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(FakeTarget())
    engine.live_costs = LiveCosts({1: COST})
    return engine


def generate(replica: TargetReplica, prompt: str, tenant: str = "t", **params: Any) -> list[Any]:
    call = GenerateCall(
        request_id=f"about-{prompt}",
        tenant=tenant,
        params=SamplingParams(**params),
        max_tokens=4,
        prompts=(prompt,),
    )

    async def run() -> list[Any]:
        return [reply async for reply in replica.generate(call)]

    return asyncio.run(run())


def logged(folder: Path) -> list[LoggedTrajectory]:
    read = read_log([folder])
    assert not read.skipped
    return read.trajectories


def totals(replica: TargetReplica, outcome: str) -> int:
    return asyncio.run(replica.stats())["totals"].get(f"valuspec_log_rows_{outcome}", 0)


def between_steps(replica: TargetReplica) -> None:
    """Return once the engine's thread has run every command given so far."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    replica._loop.run(lambda: done.put(None))
    done.get(timeout=10)


def test_finished_greedy_requests_are_logged(engine, tmp_path) -> None:
    with replica(engine, log_dir=str(tmp_path)) as running:
        generate(running, "abc")
        generate(running, "sampled", temperature=1.0)
        engine.fail_requests = {"failing"}
        assert generate(running, "failing")[-1].finish_reason == "error"
        generate(running, "plain", speculative=False)
        version = running._thresholds.current.version
    first, second = logged(tmp_path)
    assert (first.request_id, second.request_id) == ("about-abc-0", "about-plain-0")
    assert first.namespace == namespace("t", "fake-model", "fake-tokenizer")
    assert (first.model_fingerprint, first.tokenizer_fingerprint) == (
        "fake-model", "fake-tokenizer"
    )  # fmt: skip
    assert bytes(first.prompt_ids.tolist()) == b"abc"
    assert bytes(first.output_ids.tolist()) == b"abca"
    assert (first.finish_reason, first.max_tokens) == ("length", 4)
    assert first.threshold_version == version
    assert first.kept.tolist() == [3, 3]
    assert first.accepted.tolist() == [1, 1]
    assert first.batch_size.tolist() == [1, 1]
    assert first.forward_s == pytest.approx(0.002)


def test_nothing_is_logged_unless_asked_for(engine, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.active_count()
    with replica(engine) as running:
        generate(running, "abc")
        assert threading.active_count() == threads + 1  # the engine's
    assert list(tmp_path.iterdir()) == []


def test_tenants_opt_out_in_the_settings_and_without_a_restart(engine, tmp_path) -> None:
    with replica(engine, log_dir=str(tmp_path), log_opt_out=["one"]) as running:
        generate(running, "first", tenant="one")
        generate(running, "second", tenant="two")  # waits in memory when two opts out
        generate(running, "third", tenant="three")
        for named in (["two"], "two"):
            asyncio.run(running.reconfigure({"log_opt_out": named}))
            generate(running, "fourth", tenant="one")
            generate(running, "fifth", tenant="two")
            generate(running, "sixth", tenant="three")
    written = [row.request_id for row in logged(tmp_path)]
    assert written == ["about-third-0", "about-sixth-0", "about-sixth-0"]
    assert totals(running, "opted_out") == 6
    assert totals(running, "written") == 3


def test_serving_goes_on_where_nothing_can_be_written(engine, tmp_path) -> None:
    (tmp_path / "log").write_text("a file, not a folder")
    with replica(engine, log_dir=str(tmp_path / "log")) as running:
        assert generate(running, "abc")[-1].finish_reason == "length"
    assert totals(running, "dropped_write") == 1


def test_serving_goes_on_while_the_disk_hangs(engine, tmp_path, monkeypatch) -> None:
    stuck, released = threading.Event(), threading.Event()
    monkeypatch.setattr(writer, "write_whole", lambda *_: stuck.set() or released.wait(30))
    monkeypatch.setattr(replica_log, "LogLimits", partial(LogLimits, max_rows=2))
    with replica(engine, log_dir=str(tmp_path)) as running:
        for number in range(2):
            generate(running, str(number))
        assert stuck.wait(30)
        for number in range(10):
            assert generate(running, str(number))[-1].finish_reason == "length"
        assert totals(running, "dropped_queue") == 6
        released.set()


# -- costs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_engine_works_with_the_costs_of_its_own_machine(engine, tmp_path) -> None:
    with replica(engine, log_dir=str(tmp_path)) as running:
        between_steps(running)
        assert engine.thresholds.local_costs == {1: COST}
        assert engine.thresholds.version == running._thresholds.current.version
        asyncio.run(running.reconfigure({}))
        generate(running, "abc")
        assert engine.thresholds.local_costs == {1: COST}
    assert read_log([tmp_path]).costs == {1: COST}


def test_costs_follow_live_forwards_once_a_minute(engine) -> None:
    clock = Clock()
    seen: list[dict[int, CostStaircase]] = []
    loop = NoThread()
    costs = LocalCosts(engine, loop, refreshed=seen.append, clock=clock)  # type: ignore[arg-type]
    for _ in range(MIN_STEPS):
        engine.live_costs.add(batch_size=1, num_rows=4, context=0, seconds=0.048)
    clock.now = REFRESH_S - 1
    costs.refresh()
    assert len(seen) == 1
    clock.now = REFRESH_S
    costs.refresh()
    costs.refresh()
    assert len(seen) == 2
    slower = [2 * s for s in COST.seconds]
    assert seen[1][1].seconds == pytest.approx(slower)
    assert engine.thresholds.local_costs[1].seconds == pytest.approx(slower)


class NoThread:
    """Runs commands at once."""

    def run(self, command: Callable[[], None]) -> None:
        command()
