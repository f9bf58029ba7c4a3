"""A replica's threshold set: what the operator, the store and its own speed say, joined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.publishing import ThresholdFollower
from deployments.speed_watch import SpeedWatch, plain_set
from deployments.telemetry import Telemetry
from deployments.thresholds import ActiveThresholds, ThresholdEvent
from valuspec.engine.types import RequestStats
from valuspec.thresholds import ThresholdSet

logger = logging.getLogger(__name__)

_COUNTERS = {
    "changed": "valuspec_threshold_changes",
    "refused": "valuspec_thresholds_refused",
    "rolled_back": "valuspec_threshold_rollbacks",
    "slow": "valuspec_thresholds_slow",
}
_BUCKET_FIELDS = ("max_batch_size", "tau", "stream_tok_s")


class ReplicaThresholds:
    """Use from one event loop."""

    def __init__(
        self,
        model_fingerprint: str,
        retrieval: DeploymentHandle[Any] | None,
        telemetry: Telemetry,
        swap: Callable[[ThresholdSet], None] = lambda thresholds: None,
        plain_step_s: Callable[[int, int], float] | None = None,
        name: str | None = None,
    ) -> None:
        """retrieval:    knows the store; None without one
        swap:         told of every set to be used
        plain_step_s: seconds of a plain step by batch size and context; by default the set's
        name:         of this process; what Serve calls the replica by default
        """
        self._telemetry = telemetry
        self._swap = swap
        self._plain_step_s = plain_step_s
        self._watch: SpeedWatch | None = None  # of the set in use
        self._trial: ThresholdSet | None = None  # what requests get while plain speed is measured
        self._active = ActiveThresholds(
            model_fingerprint, has_store=retrieval is not None, notify=self._happened
        )
        self._follower: ThresholdFollower | None = None
        if retrieval is not None:
            self._follower = ThresholdFollower(
                self._active, retrieval, name or _replica_name(), telemetry.count
            )
        telemetry.gauge("valuspec_threshold_version", 1, version=self.current.version)

    @property
    def current(self) -> ThresholdSet:
        """The set for requests that begin now."""
        return self._active.current

    def apply(self, user_config: Mapping[str, Any]) -> None:
        """Do what a Serve `user_config` says, as far as it needs no store."""
        self._active.apply(user_config)

    async def follow(self) -> None:
        """Take the published set if there is one, and follow the store from now on."""
        if self._follower is not None:
            await self._follower.poll()
            self._follower.start()

    def finished(self, stats: RequestStats) -> None:
        """Judge the set in use by one more speculative request, and act on a verdict."""
        judged = self._trial or self.current
        if stats.threshold_version != judged.version or not stats.num_offered_nodes:
            return
        if self._watch is None:
            self._watch = SpeedWatch(self._plain_step_s or self.current.plain_step_s)
        verdict = self._watch.add(stats)
        if verdict is None:
            return
        logger.warning(
            "thresholds %s: %s, %.2fx plain", self.current.version, verdict.kind, verdict.speedup
        )
        self._telemetry.count("valuspec_speed_verdicts", kind=verdict.kind)
        self._trial = plain_set(self.current) if verdict.kind == "suspect" else None
        self._swap(self._trial or self.current)
        if verdict.kind == "slow":
            self._active.found_slow(verdict.speedup)

    async def status(self) -> dict[str, Any]:
        """What `GET /v1/valuspec/thresholds` shows; JSON values."""
        active, current = self._active, self._active.current
        shown: dict[str, Any] = {
            "model_fingerprint": active.model_fingerprint,
            "active": {
                "version": current.version,
                "origin": active.origin,
                "revision": active.revision,
                "min_similarity": current.min_similarity,
                "buckets": [
                    {name: getattr(bucket, name) for name in _BUCKET_FIELDS}
                    for bucket in current.buckets
                ],
                "provenance": dict(current.provenance),
            },
            "pinned": active.pinned,
            "plain_trial": self._trial is not None,
            "events": [asdict(event) for event in active.events],
            "store": None,
        }
        if self._follower is not None:
            shown["store"] = await self._follower.status()
        return shown

    def _happened(self, event: ThresholdEvent) -> None:
        self._telemetry.count(_COUNTERS[event.kind])
        if event.kind in ("changed", "rolled_back"):
            self._telemetry.gauge("valuspec_threshold_version", 0, version=event.old)
            self._telemetry.gauge("valuspec_threshold_version", 1, version=event.new)
            self._watch = self._trial = None
            self._swap(self.current)


def _replica_name() -> str:
    """This replica as Serve calls it; a deployment's name and some characters."""
    try:
        context = serve.get_replica_context()
    except RayServeException:  # not in a replica
        return "local"
    return f"{context.deployment}#{context.replica_id.unique_id}"
