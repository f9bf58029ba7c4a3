"""One recalibration: learn, compare with the set in use, decide, publish.

One run at a time works on a model, under a lease. Killed anywhere, it leaves the old set in use or
the new one, and the next run comes to the same result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.evaluation import evaluate
from jobs.findings import Comparison, Evaluation
from jobs.history import Answers, Split
from jobs.learning import NotEnoughDataError, check_size, learn
from jobs.prediction import choose_costs
from jobs.report import Report
from jobs.workers import Workers, in_thread, say
from retrieval.documents import Lease
from retrieval.store import StoreError
from retrieval.threshold_store import Pointer, PublishRefusedError, ThresholdStore
from valuspec.cost import CostStaircase
from valuspec.errors import ThresholdError
from valuspec.thresholds import ThresholdSet

MARGIN = 0.01
"""Least gain in tokens per second worth a new set."""
LEASE_S = 60.0
"""A killed run keeps others away for so long; a living one renews its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is asked to do.

    margin:  publish if the gain in tokens per second is at least this, and surely above zero
    force:   publish whatever the gain
    dry_run: publish nothing
    """

    logs: Sequence[Path]
    out: Path
    model_fingerprint: str | None = None
    cost_file: Path | None = None
    num_trees: int = 16
    margin: float = MARGIN
    force: bool = False
    dry_run: bool = False


async def recalibrate(settings: Settings, store: ThresholdStore | None, pool: Workers) -> Report:
    """One run; returns its report, which is also written to `settings.out` unless it is "busy".

    store: where sets are published; None, for a dry run, compares with the shipped set

    Raises ThresholdError or OSError for a cost file that cannot be used.
    """
    say(f"reading {', '.join(map(str, settings.logs))}")
    answers = Answers.from_log(settings.logs, settings.model_fingerprint)
    costs, cost_source = choose_costs(settings.cost_file, answers)
    split = Split.of(len(answers.trajectories))
    run = _Run(settings, store, pool, answers, split, costs)
    try:
        outcome, verdict = await run.work()
    except NotEnoughDataError as error:
        outcome, verdict = "not enough data", f"Nothing published: {error}."
    except PublishRefusedError as error:
        if error.reason == "conflict":  # one version, two contents: no rival run does that
            raise
        outcome, verdict = "overtaken", f"Nothing published: {error}."
    except StoreError as error:
        outcome, verdict = "store failed", f"The store failed: {error}"
    report = Report(
        title="Recalibration",
        outcome=outcome,
        verdict=verdict,
        facts={
            "logs": ", ".join(map(str, settings.logs)),
            "model": answers.model_fingerprint,
            "answers": len(answers.trajectories),
            "in the stores beforehand": len(split.history),
            "calibrated with": len(split.calibration),
            "held out": len(split.evaluation),
            "tenants": len({t.namespace for t in answers.trajectories}),
            "verify cost": cost_source,
            "measured when given": answers.measured,
            "thresholds in use before": run.version_before,
            "new thresholds": run.version_made,
        },
        skipped=answers.skipped,
        evaluation=run.evaluation,
    )
    if outcome != "busy":  # the report is the other run's to write
        report.write(settings.out)
    return report


@dataclass
class _Run:
    settings: Settings
    store: ThresholdStore | None
    pool: Workers
    answers: Answers
    split: Split
    costs: Mapping[int, CostStaircase]
    version_before: str = ""
    version_made: str = ""
    evaluation: Evaluation | None = None

    async def work(self) -> tuple[str, str]:
        """(outcome, verdict). Raises NotEnoughDataError, PublishRefusedError, StoreError."""
        check_size(self.split)
        if self.store is None or self.settings.dry_run:
            made, decision = await self._decide(await self._pointer())
            return decision or ("dry run", f"Would publish {made.version}: {self._gain()}.")
        name = f"recalibrate:{self.answers.model_fingerprint}"
        lease = await self.store.acquire_lease(name, LEASE_S)
        if lease is None:
            return "busy", "Another run is at work on this model; nothing done."
        async with _renewed(self.store, lease):
            pointer = await self._pointer()
            made, decision = await self._decide(pointer)
            if decision is None:
                decision = await self._publish(self.store, made, pointer, lease)
        return decision

    async def _decide(self, pointer: Pointer | None) -> tuple[ThresholdSet, tuple[str, str] | None]:
        """The new set, and why it is not to be published; None if it is."""
        before = await self._in_use(pointer)
        self.version_before = before.version
        # In a thread, so that the lease is renewed meanwhile.
        made, evaluation = await in_thread(self._compute, before)
        self.version_made, self.evaluation = made.version, evaluation
        compared = evaluation.comparison
        if pointer and pointer.version == made.version:
            return made, ("unchanged", f"These thresholds, {made.version}, are in use already.")
        if self.settings.force:
            return made, None
        if pointer and made.version in {past.version for past in pointer.history}:
            reason = f"{made.version} was in use before and was given up; --force brings it back."
            return made, ("kept", reason)
        if compared.gain < self.settings.margin or compared.gain_low <= 0:
            reason = f"the new thresholds bring {self._gain()}, not clearly enough for a change."
            return made, ("kept", f"{before.version} stays: {reason}")
        return made, None

    async def _publish(
        self, store: ThresholdStore, made: ThresholdSet, pointer: Pointer | None, lease: Lease
    ) -> tuple[str, str]:
        model = self.answers.model_fingerprint
        await store.put(model, made.version, made.to_json())
        await store.activate(
            model,
            made.version,
            expected_revision=pointer.revision if pointer else 0,
            reason=f"recalibrated: {self._gain()}",
            fence=lease,
        )
        return "published", f"Published {made.version}: {self._gain()}."

    async def _pointer(self) -> Pointer | None:
        if self.store is None:
            return None
        try:
            return await self.store.pointer(self.answers.model_fingerprint)
        except StoreError as error:
            if error.kind != "protocol":
                raise
            say(f"the pointer is damaged and counts as none: {error}")
            return None

    async def _in_use(self, pointer: Pointer | None) -> ThresholdSet:
        """The set replicas use; the shipped one where nothing usable is published."""
        model = self.answers.model_fingerprint
        if pointer is not None and self.store is not None:
            text = await self.store.get(pointer.version) or ""
            try:
                return ThresholdSet.from_json(text).validate(model_fingerprint=model)
            except ThresholdError as error:
                say(f"the published set {pointer.version} is refused: {error}")
        return ThresholdSet.starting(model)

    def _compute(self, before: ThresholdSet) -> tuple[ThresholdSet, Evaluation]:
        say(f"calibrating with {len(self.split.calibration)} answers")
        num_trees = self.settings.num_trees
        made = learn(
            self.answers, self.split, self.costs, num_trees=num_trees, made_by="jobs.recalibrate"
        )
        # The log does not hold what a draft head said: what is known of its edges stays.
        made = made.with_draft_model_of(before)
        say(f"comparing on {len(self.split.evaluation)} held-out answers")
        evaluation = evaluate(
            self.answers.trajectories,
            self.split,
            made,
            replace(before, local_costs=self.costs),
            self.pool,
            costs=self.costs,
            batch_shares=self.answers.steps_by_batch,
            num_trees=num_trees,
        )
        # Nothing that depends on the set in use: run again, the job must make the same set.
        held_out = {
            "num_trajectories": len(self.split.evaluation),
            "speedup": round(evaluation.comparison.speedup, 4),
            "ece": round(evaluation.reliability.expected_calibration_error, 4),
        }
        return replace(made, provenance={**made.provenance, "held_out": held_out}), evaluation

    def _gain(self) -> str:
        assert self.evaluation is not None
        return _describe_gain(self.evaluation.comparison)


def _describe_gain(compared: Comparison) -> str:
    return (
        f"{compared.gain:+.1%} tokens per second on held-out answers "
        f"({compared.gain_low:+.1%} to {compared.gain_high:+.1%})"
    )


@asynccontextmanager
async def _renewed(store: ThresholdStore, lease: Lease) -> AsyncIterator[None]:
    """Hold the lease until the end of the block.

    A lease that is lost all the same, to a pause or a broken network, needs no attention here:
    publishing is refused once another run was granted it.
    """

    async def renew() -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with suppress(StoreError):
                await store.renew_lease(lease, LEASE_S)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        with suppress(StoreError):
            await store.release_lease(lease)
