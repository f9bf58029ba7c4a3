"""From the store to the replicas, in virtual time and with faults; no Ray, no model but a tiny one.

The long test runs many seeded schedules: jobs that die or are paused past their lease, an operator
who rolls back, a store that fails and loses replies, a wall clock that jumps.
"""

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from deployments.messages import GenerateCall
from deployments.publishing import FORGET_AFTER_S, POLL_S, ThresholdDesk
from deployments.replica_thresholds import ReplicaThresholds
from deployments.schemas import FilterRequest
from deployments.settings import AppArgs
from deployments.speed_watch import SUSPICIOUS_WINDOWS, WINDOW_TOKENS
from deployments.target import TargetReplica
from deployments.valuation import Valuation
from retrieval.documents import Lease
from retrieval.store import StoreError
from retrieval.threshold_store import PublishRefusedError, ThresholdStore
from tests.support import virtual_time
from tests.support.engines import plain, request
from tests.support.publishing import (
    CountingTelemetry,
    DeskHandle,
    FaultyDocuments,
    awaited,
    publish,
)
from tests.support.threshold_sets import set_like_shipped
from tests.support.tiny_models import tiny_target
from valuspec.drafting.drafter import Drafter
from valuspec.engine.engine import Engine
from valuspec.engine.types import RequestStats, SamplingParams
from valuspec.thresholds import ThresholdSet

MODEL = "some-model"
SETS = [set_like_shipped(MODEL, str(n)) for n in range(8)]
A, B, C = SETS[:3]
SHIPPED = ThresholdSet.starting(MODEL)


class Fleet:
    """Replicas of one model that follow one store. Make it inside a running loop."""

    def __init__(self, num_replicas: int = 3) -> None:
        self.documents = FaultyDocuments(clock=virtual_time.now)
        self.store = ThresholdStore(self.documents)
        self.desk = ThresholdDesk(self.store, clock=virtual_time.now)
        self.handles = [DeskHandle(self.desk) for _ in range(num_replicas)]
        self.telemetry = [CountingTelemetry() for _ in range(num_replicas)]
        self.replicas = [
            ReplicaThresholds(MODEL, handle, telemetry, name=f"replica-{number}")
            for number, (handle, telemetry) in enumerate(
                zip(self.handles, self.telemetry, strict=True)
            )
        ]

    async def start(self) -> None:
        for replica in self.replicas:
            replica.apply({})
            await replica.follow()

    @property
    def versions(self) -> list[str]:
        return [replica.current.version for replica in self.replicas]

    def revisions(self) -> list[int]:
        return [replica._active.revision for replica in self.replicas]


def in_virtual_time(scenario: Callable[[Fleet], Awaitable[None]], num_replicas: int = 3) -> None:
    async def main() -> None:
        await scenario(Fleet(num_replicas))

    virtual_time.run(main())


# -- reaching the replicas


def test_a_replica_starts_with_what_is_published() -> None:
    async def scenario(fleet: Fleet) -> None:
        await publish(fleet.store, A)
        await fleet.start()
        assert fleet.versions == [A.version] * 3

    in_virtual_time(scenario)


def test_a_push_that_reached_one_replica_before_its_pusher_died_reaches_all() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start()
        for handle in fleet.handles[1:]:
            handle.down = True
        await publish(fleet.store, A)  # and is never heard of again
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [A.version, SHIPPED.version, SHIPPED.version]
        status = await fleet.replicas[0].status()
        assert status["store"]["num_versions"] == 2, "the skew can be seen"
        for handle in fleet.handles[1:]:
            handle.down = False
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [A.version] * 3
        status = await fleet.replicas[0].status()
        assert status["store"]["num_versions"] == 1
        assert [r["revision"] for r in status["store"]["replicas"]] == [1, 1, 1]

    in_virtual_time(scenario)


def test_a_pusher_that_died_between_its_two_steps_has_changed_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        await publish(fleet.store, A)
        await fleet.start()
        await fleet.store.put(MODEL, B.version, B.to_json())
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [A.version] * 3
        await publish(fleet.store, B)  # run again
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [B.version] * 3

    in_virtual_time(scenario)


def test_polls_are_spread_out() -> None:
    async def scenario(fleet: Fleet) -> None:
        polled: list[float] = []
        fleet.documents.fault = lambda: polled.append(virtual_time.now())
        await fleet.start()
        await asyncio.sleep(20 * POLL_S)
        gaps = [later - sooner for sooner, later in itertools.pairwise(polled[1:])]
        assert 15 < len(polled) < 30
        assert 0.5 * POLL_S <= min(gaps) < 0.8 * POLL_S
        assert 1.2 * POLL_S < max(gaps) <= 1.5 * POLL_S

    in_virtual_time(scenario, num_replicas=1)


def test_who_no_longer_polls_is_forgotten() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start()
        fleet.handles[0].down = True
        await asyncio.sleep(FORGET_AFTER_S + 2 * POLL_S)
        assert [r.replica for r in fleet.desk.replicas(MODEL)] == ["replica-1", "replica-2"]
        assert fleet.desk.replicas("another model") == []

    in_virtual_time(scenario)


def test_valuation_follows_the_pointer_of_each_model_it_is_asked_about(tmp_path) -> None:
    async def scenario(fleet: Fleet) -> None:
        other = set_like_shipped("another-model", "1")
        for thresholds in (A, other):
            await publish(fleet.store, thresholds)
        valuation = Valuation(fleet.handles[0])
        await valuation.reconfigure({})

        async def version(model: str) -> str:
            body = FilterRequest(tokens=[5], parents=[-1])
            return (await valuation.filter(body, model))["threshold_version"]

        for model, published in ((MODEL, A), ("another-model", other)):
            first = await version(model)
            assert first == ThresholdSet.starting(model).version, "nobody waits for the store"
            await asyncio.sleep(0.1)
            assert await version(model) == published.version
        await publish(fleet.store, B)
        await asyncio.sleep(3 * POLL_S)
        assert await version(MODEL) == B.version
        file = tmp_path / "set.json"
        file.write_text(C.to_json())
        await valuation.reconfigure({"threshold_file": str(file)})
        assert await version(MODEL) == C.version
        assert await version("another-model") == other.version, "the file is not of this model"

    in_virtual_time(scenario, num_replicas=1)


# -- a store that fails


def test_without_the_store_the_last_good_set_stays_and_polls_are_counted() -> None:
    async def scenario(fleet: Fleet) -> None:
        await publish(fleet.store, A)
        await fleet.start()
        asked = []

        def fault() -> Exception:
            asked.append(virtual_time.now())
            return StoreError("unreachable", "injected")

        fleet.documents.fault = fault
        await asyncio.sleep(100 * POLL_S)
        assert fleet.versions == [A.version] * 3
        totals = fleet.telemetry[0].totals
        assert totals["valuspec_threshold_polls_failed_unreachable"] > 0
        assert totals["valuspec_threshold_polls_failed_open"] > 0
        assert (await fleet.replicas[0].status())["store"]["error"] in ("unreachable", "open")
        fleet.documents.fault = lambda: None
        await publish(fleet.store, B)
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [B.version] * 3
        assert (await fleet.replicas[0].status())["store"]["error"] is None

    in_virtual_time(scenario)


def test_a_retrieval_deployment_that_hangs_holds_up_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        never = asyncio.Event()

        async def hang(report: object) -> None:
            await never.wait()

        fleet.desk.poll = hang
        fleet.handles[:] = [DeskHandle(fleet.desk)]
        telemetry = CountingTelemetry()
        replica = ReplicaThresholds(MODEL, fleet.handles[0], telemetry, name="r")
        replica.apply({})
        await asyncio.wait_for(replica.follow(), timeout=10)
        assert replica.current.version == SHIPPED.version
        assert telemetry.totals["valuspec_threshold_polls_failed_timeout"] == 1

    in_virtual_time(scenario, num_replicas=1)


@pytest.mark.fault(6)
def test_an_emptied_store_changes_nothing_until_something_is_published() -> None:
    async def scenario(fleet: Fleet) -> None:
        for thresholds in (A, B):
            await publish(fleet.store, thresholds)
        await fleet.start()
        fleet.documents._values.clear()
        fleet.documents._sets.clear()
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [B.version] * 3
        await publish(fleet.store, C)  # revision 1 again
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [C.version] * 3

    in_virtual_time(scenario)


# -- sets that must not be used


def damaged(change: Callable[[dict], object]) -> str:
    data = json.loads(B.to_json())
    change(data)
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def bucket(name: str, value: object) -> str:
    return damaged(lambda data: data["buckets"][0].update({name: value}))


BAD_TEXTS = {
    "nothing": "",
    "no json": "{",
    "deep": "[" * 100_000,
    "no object": "[1, 2]",
    "binary": "\x00\xff\ud7ff",
    "NaN": bucket("tau", float("nan")),
    "inf": bucket("stream_tok_s", float("inf")),
    "negative": bucket("tau", -0.1),
    "above 1": bucket("tau", 1.1),
    "string": bucket("tau", "high"),
    "a number as a string": bucket("tau", str(B.buckets[0].tau)),
    "missing": damaged(lambda data: data.pop("min_similarity")),
    "too much": damaged(lambda data: data.update(extra=1)),
    "other signatures": damaged(lambda data: data.update(signatures="0" * 12)),
    "a later schema": damaged(lambda data: data.update(schema=99)),
    "a million entries": damaged(
        lambda data: data["transfers"].update(
            {name: list(range(10**6)) for name in ("codes", "seen", "taken")}
        )
    ),
    "negative counts": damaged(lambda data: data["transfers"]["taken"].__setitem__(0, -1)),
    "more taken than seen": damaged(lambda data: data["transfers"]["taken"].__setitem__(0, 2**62)),
    "changed content": damaged(lambda data: data["provenance"].update(note="changed")),
    "another version": A.to_json(),
    "another model": set_like_shipped("another-model", "1").to_json(),
    "blanks around it": B.to_json() + "\n",
}


@pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_bad_sets_are_refused_whole_and_the_last_good_one_stays(text: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        await publish(fleet.store, A)
        await fleet.start()
        await publish(fleet.store, B)
        fleet.documents._values[f"vs:thresholds:{B.version}"] = text.encode()
        await asyncio.sleep(10 * POLL_S)
        assert fleet.versions == [A.version]
        assert fleet.replicas[0].current.buckets == A.buckets
        totals = fleet.telemetry[0].totals
        if text:
            assert totals["valuspec_thresholds_refused"] == 1
            events = (await fleet.replicas[0].status())["events"]
            assert (events[-1]["kind"], events[-1]["new"]) == ("refused", B.version)
            assert events[-1]["reason"]
        else:  # gone, perhaps not for good: asked for again and again
            assert totals["valuspec_threshold_polls_failed_missing"] > 5
        await publish(fleet.store, C)
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [C.version]

    in_virtual_time(scenario, num_replicas=1)


def test_an_older_pointer_and_a_conflicting_one_are_refused() -> None:
    async def scenario(fleet: Fleet) -> None:
        key = f"vs:thresholds:active:{MODEL}"
        await publish(fleet.store, A)
        first = fleet.documents._values[key]
        await publish(fleet.store, B)
        await fleet.start()
        fleet.documents._values[key] = first  # a failover that lost a write
        await asyncio.sleep(10 * POLL_S)
        assert fleet.versions == [B.version] * 3
        events = (await fleet.replicas[0].status())["events"]
        assert "from revision 2 to 1" in events[-1]["reason"]
        await publish(fleet.store, C)  # takes revision 2, which was B's
        await asyncio.sleep(10 * POLL_S)
        assert fleet.versions == [B.version] * 3
        refusals = fleet.telemetry[0].totals["valuspec_thresholds_refused"]
        events = (await fleet.replicas[0].status())["events"]
        assert refusals == 2
        assert "CONFLICT" in events[-1]["reason"]
        await publish(fleet.store, C)
        await asyncio.sleep(3 * POLL_S)
        assert fleet.versions == [C.version] * 3, "the next revision heals it"

    in_virtual_time(scenario)


# -- sets that make decoding slow


def served(version: str, speed: float) -> RequestStats:
    """One window of requests in one, at `speed` times what the set says of plain decoding."""
    stats = RequestStats(num_output_tokens=WINDOW_TOKENS + 1, num_offered_nodes=9)
    for _ in range(WINDOW_TOKENS // 2):
        stats.add_step(kept=4, accepted=1, batch_size=1, forward_s=0.0)
    stats.decode_s = WINDOW_TOKENS * SHIPPED.buckets[0].cost.seconds[0] / speed
    stats.threshold_version = version
    return stats


def test_a_set_slower_than_plain_decoding_is_given_up_and_the_event_is_kept() -> None:
    async def scenario(fleet: Fleet) -> None:
        swapped: list[str] = []
        telemetry = CountingTelemetry()
        replica = ReplicaThresholds(
            MODEL, fleet.handles[0], telemetry, lambda s: swapped.append(s.version), name="r"
        )
        await publish(fleet.store, A)
        replica.apply({})
        await replica.follow()
        await publish(fleet.store, B)
        await asyncio.sleep(3 * POLL_S)
        assert swapped == [A.version, B.version]
        for _ in range(SUSPICIOUS_WINDOWS):
            replica.finished(served(A.version, 0.1))  # began before the swap: no evidence
            replica.finished(served(B.version, 0.8))
        trial = swapped[-1]
        assert trial not in (A.version, B.version)
        assert (await replica.status())["plain_trial"]
        replica.finished(served(B.version, 0.8))  # began before the trial
        replica.finished(served(trial, 1.0))
        assert swapped[-1] == replica.current.version == A.version
        assert telemetry.totals["valuspec_threshold_rollbacks"] == 1
        event = (await replica.status())["events"][-1]
        assert (event["kind"], event["old"], event["new"]) == (
            "rolled_back",
            B.version,
            A.version,
        )
        assert "0.80x" in event["reason"]
        await asyncio.sleep(10 * POLL_S)
        assert replica.current.version == A.version, "the pointer still says B"
        [report] = [r for r in fleet.desk.replicas(MODEL) if r.replica == "r"]
        assert (report.version, report.origin) == (A.version, "rolled_back")

    in_virtual_time(scenario, num_replicas=1)


def test_a_trial_that_clears_the_set_brings_it_back() -> None:
    async def scenario(fleet: Fleet) -> None:
        swapped: list[ThresholdSet] = []
        replica = ReplicaThresholds(
            MODEL, fleet.handles[0], CountingTelemetry(), swapped.append, name="r"
        )
        for _ in range(SUSPICIOUS_WINDOWS):
            replica.finished(served(SHIPPED.version, 0.8))
        replica.finished(served(swapped[-1].version, 0.4))  # the whole machine is slow
        assert swapped[-1] is replica.current
        assert (await replica.status())["events"] == []

    in_virtual_time(scenario, num_replicas=1)


def test_a_set_that_arrives_during_a_trial_ends_it() -> None:
    async def scenario(fleet: Fleet) -> None:
        swapped: list[str] = []
        replica = ReplicaThresholds(
            MODEL,
            fleet.handles[0],
            CountingTelemetry(),
            lambda s: swapped.append(s.version),
            name="r",
        )
        replica.apply({})
        await replica.follow()
        for _ in range(SUSPICIOUS_WINDOWS):
            replica.finished(served(SHIPPED.version, 0.8))
        await publish(fleet.store, A)
        await asyncio.sleep(3 * POLL_S)
        trial, latest = swapped
        assert latest == A.version
        assert not (await replica.status())["plain_trial"]
        replica.finished(served(trial, 1.0))  # late, and about another set
        replica.finished(served(A.version, 0.8))
        assert replica.current.version == A.version
        assert len(swapped) == 2

    in_virtual_time(scenario, num_replicas=1)


# -- during traffic


class GatedEngine(Engine):
    """Steps only as often as it is let."""

    permits = threading.Semaphore(0)

    def step(self):
        self.permits.acquire()
        return super().step()


def test_sets_pushed_during_traffic_change_no_token_and_no_running_request() -> None:
    target = tiny_target()
    sets = [set_like_shipped(target.model_fingerprint, str(n)) for n in range(3)]
    prompts = [tuple((7 * n + i * i) % 200 for i in range(12)) * 3 for n in range(6)]
    wanted = [
        plain(target, request("p", p, max_tokens=24, ignore_eos=True)).token_ids for p in prompts
    ]

    async def scenario() -> None:
        store = ThresholdStore.in_memory()
        handle = DeskHandle(ThresholdDesk(store))
        engine = GatedEngine(
            target,
            drafter=Drafter(),
            thresholds=ThresholdSet.starting(target.model_fingerprint),
            max_batch_size=8,
        )
        replica = TargetReplica(
            AppArgs(model="tiny"), handle, None, load=lambda _: (target, engine)
        )
        await replica.reconfigure({})

        async def ask(number: int) -> tuple[list[int], str]:
            call = GenerateCall(
                request_id=str(number),
                tenant="t",
                params=SamplingParams(ignore_eos=True),
                max_tokens=24,
                prompts=(prompts[number],),
            )
            ids: list[int] = []
            async for delta in replica.generate(call):
                ids += delta.token_ids
                begun[number].set()
            return ids, delta.report.stats.threshold_version

        begun = [asyncio.Event() for _ in prompts]
        answers = []
        versions = []
        for number in range(len(prompts)):
            if number % 2 == 0:
                await publish(store, sets[number // 2])
                await replica._thresholds.follow()
            versions.append(replica._thresholds.current.version)
            answers.append(asyncio.create_task(ask(number)))
            while not begun[number].is_set():  # admitted while the earlier ones are running
                engine.permits.release()
                await asyncio.sleep(0.001)
        assert engine.num_running > 1
        engine.permits.release(1000)
        done = await asyncio.gather(*answers)
        assert [ids for ids, _ in done] == wanted
        assert [version for _, version in done] == versions
        assert versions == [sets[n // 2].version for n in range(len(prompts))]

    asyncio.run(scenario())


# -- everything at once


class KilledError(Exception):
    """A job was killed here."""


async def job(store: ThresholdStore, rng: random.Random, published: list[tuple[int, int]]) -> None:
    """One run of a recalibration job that may be paused or die anywhere."""

    async def moment() -> None:
        if rng.random() < 0.05:
            raise KilledError
        await asyncio.sleep(rng.choice((0.01, 0.1, 1.0, 30.0)))

    lease: Lease | None = await store.acquire_lease("recalibrate", 10)
    if lease is None:
        return
    await moment()
    pointer = await store.pointer(MODEL)
    await moment()
    thresholds = rng.choice(SETS)
    await store.put(MODEL, thresholds.version, thresholds.to_json())
    await moment()
    moved = await store.activate(
        MODEL,
        thresholds.version,
        expected_revision=pointer.revision if pointer else 0,
        reason="job",
        fence=lease,
    )
    published.append((moved.revision, lease.token))
    await moment()
    await store.release_lease(lease)


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_faults_leaves_the_fleet_right(seed: int, monkeypatch) -> None:
    rng = random.Random(seed)
    random.seed(seed)  # of the polls
    # Wall clocks jump by an hour, back and forth; nothing here may look at one.
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + rng.uniform(-3600, 3600))

    async def main() -> None:
        fleet = Fleet()
        published: list[tuple[int, int]] = []
        revisions: list[int] = []
        highest = [0] * len(fleet.replicas)
        usable = {SHIPPED.version, *(s.version for s in SETS)}
        healthy = False

        def fault() -> Exception | None:
            failing = not healthy and rng.random() < 0.1
            return StoreError("unreachable", "injected") if failing else None

        async def again_and_again(work: Callable[[], Awaitable[object]]) -> None:
            while not healthy:
                outcome = await awaited(work())
                assert not isinstance(outcome, Exception) or isinstance(
                    outcome, StoreError | PublishRefusedError | KilledError
                ), outcome
                await asyncio.sleep(rng.uniform(0, 10))

        async def operator() -> None:
            """Activates what there is, or rolls back; without a lease."""
            pointer = await fleet.store.pointer(MODEL)
            by_hand = {"expected_revision": pointer.revision if pointer else 0, "reason": "hand"}
            versions = await fleet.store.versions(MODEL)
            if versions and rng.random() < 0.5:
                moved = await fleet.store.activate(MODEL, rng.choice(versions), **by_hand)
            else:
                moved = await fleet.store.rollback(MODEL, **by_hand)
            revisions.append(moved.revision)

        def check() -> None:
            for number, revision in enumerate(fleet.revisions()):
                assert revision >= highest[number], "never back"
                highest[number] = revision
            assert set(fleet.versions) <= usable

        fleet.documents.fault = fault
        fleet.documents.latency = lambda: rng.choice((0.0, 0.01, 0.5))
        fleet.documents.lost_reply = lambda: not healthy and rng.random() < 0.05
        await fleet.start()
        tasks = [
            asyncio.create_task(again_and_again(work))
            for work in (*[lambda: job(fleet.store, rng, published)] * 2, *[operator] * 4)
        ]
        for _ in range(600):
            await asyncio.sleep(1)
            rng.choice(fleet.handles).down = rng.random() < 0.3
            check()
        healthy = True
        for handle in fleet.handles:
            handle.down = False
        await asyncio.gather(*tasks)
        await asyncio.sleep(60)
        check()
        pointer = await fleet.store.pointer(MODEL)
        assert pointer is not None, "or this shows nothing"
        assert fleet.versions == [pointer.version] * 3
        assert fleet.revisions() == [pointer.revision] * 3
        tokens = [token for _, token in published]
        assert tokens == sorted(tokens), "no stale lease published after a later one"
        revisions += [revision for revision, _ in published]
        assert len(set(revisions)) == len(revisions), "no revision was given twice"

    virtual_time.run(main())
