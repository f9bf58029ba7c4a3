"""A replica's threshold set: what the operator, the store and its own speed say, joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.publishing import ThresholdFollower
from deployments.telemetry import Telemetry
from deployments.thresholds import ActiveThresholds, ThresholdEvent
from valuspec.thresholds import ThresholdSet

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
    ) -> None:
        """retrieval: knows the store, None without one; swap: told of every set to be used"""
        self._telemetry = telemetry
        self._swap = swap
        self._active = ActiveThresholds(
            model_fingerprint, has_store=retrieval is not None, notify=self._happened
        )
        self._follower: ThresholdFollower | None = None
        if retrieval is not None:
            self._follower = ThresholdFollower(
                self._active, retrieval, _replica_name(), telemetry.count
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
            self._swap(self.current)


def _replica_name() -> str:
    """This replica as Serve calls it; a deployment's name and some characters."""
    try:
        context = serve.get_replica_context()
    except RayServeException:  # not in a replica
        return "local"
    return f"{context.deployment}#{context.replica_id.unique_id}"
