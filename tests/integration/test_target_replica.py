"""The replica class with a fake engine: thresholds, write-back, lookups, health."""

import asyncio
import queue

import pytest

from deployments.engine_loop import MAX_FAILED_STEPS
from deployments.messages import GenerateCall
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from tests.support.fake_engine import FakeEngine, FakeTarget
from valuspec.engine.types import SamplingParams
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

TREE = DraftTree.from_paths([[97, 98]])


class FakeDrafts:
    """Stands for DraftStore: finds TREE for every prompt, remembers what is written."""

    def __init__(self) -> None:
        self.looked_up: list[tuple[int, ...]] = []
        self.num_warmed = 0
        self.written: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def lookup(self, namespace, prompt_ids, report) -> list[DraftTree]:
        self.looked_up.append(prompt_ids)
        report.outcome = "hit"
        return [TREE]

    async def recent(self, max_nodes) -> list[tuple[str, DraftTree]]:
        self.num_warmed += 1
        return [("ns", TREE)]

    def write_back(self, namespace, prompt_ids, output_ids) -> None:
        self.written.append((prompt_ids, output_ids))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(FakeTarget())


@pytest.fixture
def replica(engine):
    replica = TargetReplica(
        AppArgs(model="fake"), None, None, load=lambda _: (engine.target, engine)
    )
    replica._drafts = FakeDrafts()
    yield replica
    engine.gate.set()
    replica._loop.stop()


def generate(replica: TargetReplica, *prompts: str, n: int = 1, **params) -> list:
    call = GenerateCall(
        request_id="r",
        tenant="t",
        params=SamplingParams(**params),
        max_tokens=4,
        prompts=prompts,
        n=n,
    )

    async def run() -> list:
        return [reply async for reply in replica.generate(call)]

    return asyncio.run(run())


def between_steps(replica: TargetReplica) -> None:
    """Return once the engine's thread has run every command given so far."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    replica._loop.run(lambda: done.put(None))
    done.get(timeout=10)


def test_stored_answers_are_remembered_once_before_the_first_request(replica, engine) -> None:
    asyncio.run(replica.reconfigure({}))
    asyncio.run(replica.reconfigure({}))
    between_steps(replica)
    assert engine.remembered == [("ns", TREE)]
    assert replica._drafts.num_warmed == 1


def test_thresholds_are_swapped_between_steps_and_bad_ones_refused(
    replica, engine, tmp_path
) -> None:
    shipped = ThresholdSet.starting("fake-model")
    changed = ThresholdSet(
        model_fingerprint="fake-model",
        seen=shipped.seen,
        taken=shipped.taken,
        buckets=shipped.buckets,
        provenance={"note": "changed"},
    )
    path = tmp_path / "set.json"
    path.write_text(changed.to_json())
    asyncio.run(replica.reconfigure({"threshold_file": str(path)}))
    between_steps(replica)
    assert engine.thresholds.version == changed.version
    assert generate(replica, "abc")[-1].report.stats.threshold_version == changed.version

    path.write_text("damaged")
    asyncio.run(replica.reconfigure({"threshold_file": str(path)}))
    between_steps(replica)
    assert engine.thresholds.version == changed.version
    stats = asyncio.run(replica.stats())
    assert stats["threshold_version"] == changed.version
    assert stats["totals"]["valuspec_thresholds_refused"] == 1


def test_repeats_of_a_prompt_share_one_lookup(replica) -> None:
    replies = generate(replica, "ab", "cd", n=2)
    assert replica._drafts.looked_up == [tuple(b"ab"), tuple(b"cd")]
    assert {r.report.retrieval.outcome for r in replies if r.report} == {"hit"}


def test_plain_requests_are_not_looked_up(replica) -> None:
    replies = generate(replica, "ab", speculative=False)
    assert replica._drafts.looked_up == []
    assert replies[-1].report.retrieval.outcome == "off"


def test_only_whole_greedy_answers_are_stored(replica, engine) -> None:
    generate(replica, "ab")
    assert replica._drafts.written == [(tuple(b"ab"), tuple(b"abab"))]
    generate(replica, "ab", temperature=0.5)
    engine.fail_requests = {"cd"}
    assert generate(replica, "cd")[-1].finish_reason == "error"
    assert len(replica._drafts.written) == 1


def test_repeats_have_seeds_of_their_own(replica, engine) -> None:
    seeds = []
    add = engine.add
    engine.add = lambda request: (seeds.append(request.params.seed), add(request))
    generate(replica, "ab", n=3, temperature=1.0, seed=2**63 - 2)
    assert seeds == [2**63 - 2, 2**63 - 1, 0]


def test_health_follows_the_engine(replica, engine) -> None:
    replica.check_health()
    engine.fail_step = RuntimeError("broken")
    for _ in range(MAX_FAILED_STEPS):
        assert generate(replica, "ab")[-1].finish_reason == "error"
    with pytest.raises(RuntimeError):
        replica.check_health()
    assert asyncio.run(replica.stats())["num_requests_unfinished"] == 0


def test_an_answer_that_is_read_slowly_holds_no_place(replica, engine) -> None:
    """It is computed to its end while nobody reads, and is still there for whoever does."""
    call = GenerateCall(
        request_id="r", tenant="t", params=SamplingParams(), max_tokens=40, prompts=("abc",), n=2
    )

    async def run() -> list:
        replies = replica.generate(call)
        first = await anext(replies)
        while engine.has_work or replica._num_unfinished:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0)
        return [first, *[reply async for reply in replies]]

    replies = asyncio.run(run())
    for index in (0, 1):
        text = "".join(reply.text for reply in replies if reply.index == index)
        assert text == ("abc" * 14)[:40]
    assert sum(reply.finish_reason == "length" for reply in replies) == 2
    assert replica._num_unfinished == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_whose_time_is_up_is_given_up(engine, steps: int) -> None:
    """Before its first token and after; its place is free at once."""
    args = AppArgs(model="fake", request_timeout_s=0.5)
    replica = TargetReplica(args, None, None, load=lambda _: (engine.target, engine))
    engine.hold_after_step = steps or None
    if not steps:
        engine.gate.clear()
    call = GenerateCall(
        request_id="r", tenant="t", params=SamplingParams(), max_tokens=40, prompts=("abc",), n=1
    )

    async def run() -> list:
        replies = [reply async for reply in replica.generate(call)]
        engine.gate.set()
        await asyncio.to_thread(between_steps, replica)
        return replies

    try:
        *deltas, refusal = asyncio.run(run())
    finally:
        engine.gate.set()
        replica._loop.stop()
    assert len(deltas) == steps
    assert (refusal.status, refusal.code) == (504, "timeout")
    assert "0.5 s" in refusal.message
    assert engine.cancelled == ["r-0"]
    assert replica._telemetry.totals()["valuspec_requests_refused_504"] == 1
    assert replica._num_unfinished == 0
