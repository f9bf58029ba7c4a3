"""A replica's way to the trajectory log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from deployments.loading import Target
from deployments.settings import AppArgs
from deployments.telemetry import Telemetry
from retrieval.namespace import namespace
from retrieval.trajectory_log import LoggedTrajectory, LogLimits, TrajectoryLog
from valuspec.cost import CostStaircase
from valuspec.engine.types import GenerationRequest, RequestStats

_DAY_S = 24 * 3600.0


class ReplicaLog:
    """Logs finished greedy requests where `args.log_dir` says so; nothing without it."""

    def __init__(self, args: AppArgs, target: Target, telemetry: Telemetry) -> None:
        self._target = target
        self._always_opted_out = args.log_opt_out
        self._log: TrajectoryLog | None = None
        if args.log_dir is not None:
            self._log = TrajectoryLog(
                args.log_dir,
                limits=LogLimits(
                    max_bytes=args.log_max_bytes, max_age_s=args.log_max_age_days * _DAY_S
                ),
                count=lambda outcome, rows: telemetry.count(
                    "valuspec_log_rows", rows, outcome=outcome
                ),
            )
        self.reconfigure({})

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Write nothing more of the tenants in `user_config.log_opt_out` and in the settings."""
        if self._log is None:
            return
        named = user_config.get("log_opt_out") or ()
        if isinstance(named, str):  # its letters are not meant
            named = (named,)
        self._log.opted_out = frozenset(
            namespace(tenant, self._target.model_fingerprint, self._target.tokenizer_fingerprint)
            for tenant in (*self._always_opted_out, *named)
        )

    def use_costs(self, costs: Mapping[int, CostStaircase]) -> None:
        """Store these verify costs with the rows to come."""
        if self._log is not None:
            self._log.costs = costs

    def add(
        self,
        request: GenerationRequest,
        output_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        stats: RequestStats,
    ) -> None:
        """Log a greedy request that ended by itself. Never waits."""
        if self._log is None:
            return
        self._log.add(
            LoggedTrajectory(
                request_id=request.request_id,
                namespace=request.namespace,
                model_fingerprint=self._target.model_fingerprint,
                tokenizer_fingerprint=self._target.tokenizer_fingerprint,
                threshold_version=stats.threshold_version,
                finish_reason=finish_reason,
                max_tokens=request.params.max_tokens,
                prompt_ids=np.array(request.prompt_ids, np.int32),
                output_ids=np.array(output_ids, np.int32),
                kept=np.array(stats.kept, np.int32),
                accepted=np.array(stats.accepted, np.int32),
                batch_size=np.array(stats.batch_size, np.int32),
                queue_s=stats.queue_s,
                prefill_s=stats.prefill_s,
                decode_s=stats.decode_s,
                forward_s=stats.forward_s,
                draft_s=stats.draft_s,
                valuation_s=stats.valuation_s,
                finished_at=time.time(),
            )
        )

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        if self._log is not None:
            self._log.close()
