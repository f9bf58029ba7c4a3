"""How many target replicas there should be, from what each says of its load.

What limits a replica is its batch or its cache, whichever is full first: many short requests run
out of places, a few long ones out of room for keys and values. So a replica's load is the greater
of the two shares, requests that wait included, and 1.0 is a replica used in full. Queue lengths
alone, Serve's own measure, would call eight questions and eight books the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.config import AutoscalingContext

LOAD_METRIC = "load"
"""Name under which replicas report it, by Serve's `record_autoscaling_stats`."""


def load(num_requests: int, num_tokens: int, *, max_batch_size: int, kv_tokens: int) -> float:
    """Load of one replica, 1.0 when its batch or its cache is full; more while requests wait.

    num_requests, num_tokens: running and waiting ones; tokens of prompts and of answers so far
    kv_tokens:                tokens whose keys and values the cache holds
    """
    return max(num_requests / max_batch_size, num_tokens / kv_tokens)


def replicas_wanted(
    loads: Sequence[float], num_replicas: int, *, target_load: float, slack: float
) -> float:
    """How many replicas would carry the sum of `loads` at `target_load` each.

    num_replicas: running now; new ones may not have reported yet
    slack:        a replica is given up only if the others then stay this share below the target,
                  so that a load near a boundary does not start and stop replicas by turns
    """
    total = sum(loads)
    wanted = total / target_load
    if wanted >= num_replicas:
        return wanted
    return min(num_replicas, total / (target_load * (1 - slack)))


class LoadPolicy:
    """Serve's autoscaling policy of the Target deployment; bounds and delays are Serve's.

    Named in the Serve configuration as `deployments.autoscaling:LoadPolicy`.
    """

    def __init__(self, target_load: float = 0.8, slack: float = 0.25) -> None:
        if target_load <= 0 or not 0 <= slack < 1:
            raise ValueError(
                f"target_load {target_load} must be above 0, slack {slack} in 0..1 (without 1)"
            )
        self._target_load = target_load
        self._slack = slack

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The wanted number, and no state to keep."""
        reports = (context.aggregated_metrics or {}).get(LOAD_METRIC, {})
        # A replica that is gone may have a report left in the look-back window.
        loads = [reports[replica] for replica in context.running_replicas if replica in reports]
        if not loads:  # nothing is known: stay
            return context.target_num_replicas, {}
        wanted = replicas_wanted(
            loads,
            context.current_num_replicas,
            target_load=self._target_load,
            slack=self._slack,
        )
        return wanted, {}
