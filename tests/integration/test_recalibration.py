"""The recalibration job: what it publishes, and what it leaves behind when it is disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import recalibration
from jobs.evaluation import evaluate
from jobs.findings import Comparison, Evaluation
from jobs.learning import learn
from jobs.recalibrate import main
from jobs.recalibration import LEASE_S, Settings, recalibrate
from jobs.report import Report
from jobs.workers import InProcess
from retrieval.embedded import EmbeddedValkey
from retrieval.threshold_store import Pointer, PublishRefusedError, ThresholdStore
from tests.support.answer_logs import write_log
from tests.support.publishing import FaultyDocuments
from tests.support.threshold_sets import set_like_shipped
from tests.support.trajectories import markov_answers
from valuspec.replay import Trajectory
from valuspec.thresholds import ThresholdSet

MODEL = "model"  # as in the rows of the log
ANSWERS = markov_answers(80, 3, 30)


class KilledError(BaseException):
    """The process ends here."""


class Site:
    """A log, a store, and runs of the job against them."""

    def __init__(self, folder: Path) -> None:
        self.log, self.out = folder / "log", folder / "out"
        self.log.mkdir()
        self.now = 0.0
        self.documents = FaultyDocuments(clock=lambda: self.now)
        self.store = ThresholdStore(self.documents)

    def settings(self, **changes: Any) -> Settings:
        return replace(Settings(logs=[self.log], out=self.out), **changes)

    async def run(self, **changes: Any) -> Report:
        return await recalibrate(self.settings(**changes), self.store, InProcess())

    async def active(self) -> str | None:
        pointer = await self.store.pointer(MODEL)
        return pointer and pointer.version

    async def publish(self, thresholds: ThresholdSet) -> Pointer:
        await self.store.put(MODEL, thresholds.version, thresholds.to_json())
        pointer = await self.store.pointer(MODEL)
        return await self.store.activate(
            MODEL, thresholds.version, expected_revision=pointer.revision if pointer else 0,
            reason="by hand",
        )  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    write_log(site.log, ANSWERS)
    return site


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    """Results of the slow parts, by (function, arguments that matter)."""
    return {}


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Reports without figures: these take a second to draw."""
    monkeypatch.setattr(Report, "to_html", lambda report: report.verdict)


@pytest.fixture
def fast(monkeypatch, undrawn: None, computed: dict[str, Any]) -> None:
    """Learn and evaluate once for all tests that ask for it: they have one log and one old set,
    and look at the store."""

    def once(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name not in computed:
                computed[name] = function(*args, **options)
            return computed[name]

        return call

    def better(*args: Any, **options: Any) -> Evaluation:
        return replace(evaluate(*args, **options), comparison=Comparison(2.2, 2.0, 0.1, 0.05, 0.15))

    monkeypatch.setattr(recalibration, "learn", once("learn", learn))
    monkeypatch.setattr(recalibration, "evaluate", once("evaluate", better))


@pytest.mark.usefixtures("undrawn")
def test_what_is_clearly_better_is_published_and_then_left_alone(site: Site) -> None:
    shipped = ThresholdSet.starting(MODEL)
    plain = replace(shipped, buckets=tuple(replace(b, tau=1.0) for b in shipped.buckets))
    asyncio.run(site.publish(plain))
    report = asyncio.run(site.run())
    assert report.outcome == "published"
    version = asyncio.run(site.active())
    text = asyncio.run(site.store.get(version or ""))
    published = ThresholdSet.from_json(text or "").validate(model_fingerprint=MODEL)
    assert published.provenance["held_out"]["num_trajectories"] == 16
    written = json.loads((site.out / "report.json").read_text())
    assert written["outcome"] == "published"
    assert written["facts"]["new thresholds"] == version
    assert (site.out / "report.html").read_text() == report.verdict
    again = asyncio.run(site.run())
    assert again.outcome == "unchanged"
    pointer = asyncio.run(site.store.pointer(MODEL))
    assert pointer is not None
    assert pointer.revision == 2
    assert pointer.previous == plain.version


@pytest.mark.usefixtures("fast")
def test_what_is_not_better_by_the_margin_is_not_published(site: Site) -> None:
    report = asyncio.run(site.run(margin=0.5))
    assert report.outcome == "kept"
    assert asyncio.run(site.active()) is None
    assert asyncio.run(site.run(margin=0.5, force=True)).outcome == "published"


@pytest.mark.usefixtures("fast")
def test_what_was_given_up_does_not_come_back_by_itself(site: Site) -> None:
    async def story() -> list[str]:
        outcomes = [(await site.run()).outcome]
        made = await site.active()
        # What a set knows of a draft model is handed on: the older one knows the same.
        older = set_like_shipped(MODEL, "older")
        await site.publish(older.with_draft_model_of(ThresholdSet.starting(MODEL)))
        outcomes.append((await site.run()).outcome)
        assert await site.active() != made
        outcomes.append((await site.run(force=True)).outcome)
        assert await site.active() == made
        return outcomes

    assert asyncio.run(story()) == ["published", "kept", "published"]


@pytest.mark.usefixtures("fast")
def test_a_dry_run_writes_its_report_and_nothing_else(site: Site) -> None:
    def refused() -> Exception:
        return AssertionError("the store was written to")

    site.documents.lost_reply = lambda: (_ for _ in ()).throw(refused())
    assert asyncio.run(site.run(dry_run=True)).outcome == "dry run"
    assert (site.out / "report.html").is_file()
    without_store = asyncio.run(recalibrate(site.settings(dry_run=True), None, InProcess()))
    assert without_store.outcome == "dry run"


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("text", ["{", json.dumps({"schema": 99}), ""])
def test_a_set_in_use_that_this_build_refuses_is_replaced(site: Site, text: str) -> None:
    async def story() -> str:
        await site.store.put(MODEL, "broken", text)
        await site.store.activate(MODEL, "broken", expected_revision=0, reason="by hand")
        return (await site.run()).outcome

    assert asyncio.run(story()) == "published"


@pytest.mark.usefixtures("fast")
def test_another_content_under_the_new_version_is_a_loud_failure(site: Site) -> None:
    async def story() -> None:
        made = (await site.run(dry_run=True)).facts["new thresholds"]
        await site.store.put(MODEL, made, "tampered with")
        await site.run()

    with pytest.raises(PublishRefusedError, match="conflict"):
        asyncio.run(story())
    assert asyncio.run(site.active()) is None
    assert asyncio.run(site.store.acquire_lease(f"recalibrate:{MODEL}", 1))  # given back


# -- two at once, and one paused past its lease ---------------------------------------------------


@pytest.mark.usefixtures("fast")
def test_of_two_at_once_exactly_one_works(site: Site) -> None:
    async def both() -> list[str]:
        reports = await asyncio.gather(site.run(), site.run(out=site.out / "other"))
        return sorted(r.outcome for r in reports)

    assert asyncio.run(both()) == ["busy", "published"]
    pointer = asyncio.run(site.store.pointer(MODEL))
    assert pointer is not None
    assert pointer.revision == 1
    folders = [site.out / "report.json", site.out / "other" / "report.json"]
    assert sum(f.exists() for f in folders) == 1  # the busy one leaves the other's report alone


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("other_published", [False, True])
def test_a_run_paused_past_its_lease_publishes_nothing(
    site: Site, monkeypatch, other_published: bool
) -> None:
    """It wakes while the next run is still at work, or when that run has published."""

    async def next_run() -> None:
        lease = await site.store.acquire_lease(f"recalibrate:{MODEL}", LEASE_S)
        assert lease is not None
        if other_published:
            await site.publish(set_like_shipped(MODEL, "the next run's"))

    def paused(*args: Any, **options: Any) -> ThresholdSet:
        site.now += 2 * LEASE_S
        asyncio.run(next_run())
        made: ThresholdSet = recalibration_learn(*args, **options)
        return made

    recalibration_learn = recalibration.learn
    monkeypatch.setattr(recalibration, "learn", paused)
    report = asyncio.run(site.run())
    assert report.outcome == "overtaken"
    next_version = set_like_shipped(MODEL, "the next run's").version
    assert asyncio.run(site.active()) == (next_version if other_published else None)
    # The lease is the next run's: the paused one must not have released it.
    assert asyncio.run(site.store.acquire_lease(f"recalibrate:{MODEL}", 1)) is None


@pytest.mark.usefixtures("fast")
def test_a_lapsed_lease_that_nobody_took_does_no_harm(site: Site, monkeypatch) -> None:
    recalibration_learn = recalibration.learn

    def slow(*args: Any, **options: Any) -> Any:
        site.now += 2 * LEASE_S
        return recalibration_learn(*args, **options)

    monkeypatch.setattr(recalibration, "learn", slow)
    assert asyncio.run(site.run()).outcome == "published"


# -- killed ---------------------------------------------------------------------------------------


def killed_at_call(site: Site, number: int, *, after: bool) -> None:
    """At its call `number` on the store (`after`: its change), the process ends, for good."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise KilledError

    if after:
        site.documents.lost_reply = lambda: bool(count())
    else:
        site.documents.fault = count


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call_on_the_store(site: Site, after: bool) -> None:
    outcomes = []
    for number in range(1, 30):
        site.documents = FaultyDocuments(clock=lambda: site.now)
        site.store = ThresholdStore(site.documents)
        old = asyncio.run(site.publish(set_like_shipped(MODEL, "old"))).version
        killed_at_call(site, number, after=after)
        try:
            asyncio.run(site.run())
        except KilledError:
            ended = False
        else:
            ended = True
        site.documents.fault, site.documents.lost_reply = lambda: None, lambda: False
        seen = asyncio.run(site.active())
        site.now += 2 * LEASE_S
        again = asyncio.run(site.run())
        new = asyncio.run(site.active())
        assert seen in (old, new)
        assert new != old
        assert again.outcome == ("unchanged" if seen == new else "published")
        outcomes.append(again.outcome)
        if ended:
            break
    assert ended
    assert {"published", "unchanged"} == set(outcomes)  # both sides of the step were seen


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "step", ["Answers.from_log", "learn", "evaluate", "Report.write", "ThresholdStore.put"]
)
def test_killed_in_a_step(site: Site, monkeypatch, step: str) -> None:
    def killed(*args: Any, **options: Any) -> Any:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(f"jobs.recalibration.{step}", killed)
        with pytest.raises(KilledError):
            asyncio.run(site.run())
    written_before_death = asyncio.run(site.active())
    assert written_before_death is None or step == "Report.write"
    site.now += 2 * LEASE_S
    assert asyncio.run(site.run()).outcome == ("unchanged" if written_before_death else "published")
    assert asyncio.run(site.active())


def test_a_process_killed_at_work_keeps_the_next_one_away_until_its_lease_ends(
    site: Site, capsys
) -> None:
    with EmbeddedValkey() as valkey:
        arguments = ["--log", str(site.log), "--redis-url", valkey.url, "--out", str(site.out)]
        job = subprocess.Popen(
            [sys.executable, "-m", "jobs.recalibrate", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        assert job.stderr is not None
        for line in job.stderr:
            if "calibrating" in line:
                break
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert main(arguments) == 4
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["outcome"] == "busy"
        assert not site.out.exists()

        async def look() -> Pointer | None:
            store = ThresholdStore.at(valkey.url)
            pointer = await store.pointer(MODEL)
            await store.aclose()
            return pointer

        assert asyncio.run(look()) is None


# -- what is in the log ---------------------------------------------------------------------------


def run_on(tmp_path: Path, answers: list[Trajectory]) -> tuple[Site, Report]:
    site = Site(tmp_path)
    write_log(site.log, answers)
    return site, asyncio.run(site.run())


@pytest.mark.parametrize("count", [0, 49])
def test_too_little_to_learn_from(tmp_path: Path, count: int) -> None:
    site, report = run_on(tmp_path, ANSWERS[:count])
    assert report.outcome == "not enough data"
    assert str(count) in report.verdict
    assert asyncio.run(site.active()) is None
    assert "Nothing published" in (site.out / "report.html").read_text()
    # Nor was anybody kept away for nothing.
    assert asyncio.run(site.store.acquire_lease(f"recalibrate:{MODEL}", 1))


@pytest.mark.usefixtures("undrawn")
def test_a_tenant_with_nearly_all_of_the_log_does_not_decide_alone(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("jobs.history.MIN_TENANT_ANSWERS", 5)
    rows = [
        replace(t, namespace="small" if i % 10 == 0 else "large")
        for i, t in enumerate(markov_answers(100, 3, 24))
    ]
    _, report = run_on(tmp_path, rows)
    assert report.evaluation is not None
    weights = {name: answers * weight for name, answers, weight, _ in report.evaluation.tenants}
    assert weights["large"] == pytest.approx(5)  # of 18
    assert weights["small"] == 2


@pytest.mark.usefixtures("undrawn")
def test_drafts_that_are_never_accepted_lead_to_plain_decoding(tmp_path: Path) -> None:
    """Each token comes again, and what follows it never does: all drafts are wrong."""
    rng = np.random.default_rng(0)
    pairs = [(a, b) for a in range(1, 60) for b in range(1, 60)]
    follows = {a: rng.permutation([b for x, b in pairs if x == a]).tolist() for a in range(1, 60)}
    token, walk = 1, []
    while follows[token] and len(walk) < 60 * 34:
        token = follows[token].pop()
        walk.append(token)
    tokens = np.array(walk, np.int32)
    rows = [
        Trajectory(tokens[i : i + 4], tokens[i + 4 : i + 34], 30)
        for i in range(0, len(tokens) - 34, 34)
    ]
    _, report = run_on(tmp_path, rows)
    assert report.evaluation is not None
    assert report.evaluation.speedup("unfiltered") < 0.6
    assert report.evaluation.speedup("oracle") == pytest.approx(1.0, abs=0.01)
    assert report.evaluation.speedup("filtered") == pytest.approx(1.0, abs=0.01)
    assert 0 <= report.evaluation.buckets[0].tau <= 1


class _Foreign(pa.ExtensionType):
    """A type whose deserialiser must not run."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.foreign")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Any:
        raise AssertionError("an extension type was deserialised")


@pytest.fixture
def extension_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "extension.parquet"
    kind = _Foreign()
    pa.register_extension_type(kind)
    storage = pa.array([1], pa.int64())
    pq.write_table(pa.table({"a": pa.ExtensionArray.from_storage(kind, storage)}), path)
    yield path
    pa.unregister_extension_type("tests.foreign")


@pytest.mark.usefixtures("undrawn")
def test_the_job_works_on_whatever_is_readable(site: Site, extension_file: Path, capsys) -> None:
    whole = sorted(site.log.glob("*.parquet"))
    good = whole[-1].read_bytes()
    (site.log / "zero.parquet").write_bytes(b"")
    (site.log / "truncated.parquet").write_bytes(good[: len(good) // 2])
    flipped = bytearray(good)
    flipped[len(good) // 3] ^= 4
    (site.log / "flipped.parquet").write_bytes(flipped)
    pq.write_table(pa.table({"a": [1]}), site.log / "foreign.parquet")
    extension_file.rename(site.log / "extension.parquet")
    (site.log / "killed.parquet.tmp").write_bytes(good[:100])  # left by a writer that was killed
    (site.log / "copy.parquet").write_bytes(good)
    arguments = ["--log", str(site.log), "--out", str(site.out), "--dry-run", "--trees", "0"]
    assert main([*arguments, "--redis-url", "unix:///nowhere/valkey.sock"]) == 6
    capsys.readouterr()
    with EmbeddedValkey() as valkey:
        assert main([*arguments, "--redis-url", valkey.url]) == 0
    skipped = json.loads((site.out / "report.json").read_text())["skipped"]
    assert skipped == {
        "file.empty": 1,
        "file.truncated": 1,
        "file.damaged": 1,
        "file.foreign": 2,
        "row.duplicate": 5,
    }
    lines = capsys.readouterr().out.splitlines()
    assert "left out: 2 x file.foreign" in lines
    assert json.loads(lines[-1])["outcome"] in ("dry run", "kept")


def test_wrong_arguments(tmp_path: Path, capsys) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text('{"costs": {"1": {"rows": [1, 2], "seconds": [0.1, NaN]}}}')
    assert main(["--dry-run", "--log", str(tmp_path), "--cost", str(cost)]) == 2
    assert "cost" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["--dry-run", "--force"])
    assert end.value.code == 2
