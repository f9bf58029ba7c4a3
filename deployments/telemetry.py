"""Counters, gauges and histograms of a replica, in vLLM's vocabulary.

Ray's metrics agent exports them with the prefix `ray_` (and `_total` on counters), tagged by
deployment, replica and application; only the tags in the tables below are added, since each value
of a tag is a time series. Where Ray's metrics are not available the totals are still kept, for
`/v1/valuspec/stats`.

Ratios are left to queries, which aggregate over replicas: acceptance rate is
`rate(accepted_tokens) / rate(draft_tokens)`, mean acceptance length
`1 + rate(accepted_tokens) / rate(drafts)`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any, cast

from ray.serve import metrics

from deployments.messages import ChoiceReport

logger = logging.getLogger(__name__)

_LATENCY_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60]
#: Accepted positions beyond this one share its series.
MAX_POSITION = 16

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "valuspec_spec_decode_num_drafts": ("Verification steps.", ()),
    "valuspec_spec_decode_num_draft_tokens": ("Nodes verified by the target.", ()),
    "valuspec_spec_decode_num_accepted_tokens": ("Draft tokens accepted, bonus excluded.", ()),
    "valuspec_spec_decode_num_accepted_tokens_per_pos": (
        "Draft tokens accepted at each depth.",
        ("position",),
    ),
    "valuspec_tree_nodes_offered": ("Candidate nodes before valuation.", ()),
    "valuspec_tree_nodes_kept": ("Candidate nodes kept by valuation.", ()),
    "valuspec_retrieval_requests": ("Lookups of draft trees.", ("outcome",)),
    "valuspec_store_errors": ("Calls of the store that failed.", ("kind",)),
    "valuspec_trees_refused": ("Retrieved trees that do not fit the vocabulary.", ()),
    "valuspec_warmed_answers": ("Stored trees a replica read before its first request.", ()),
    "valuspec_write_back": ("Finished answers offered to the store.", ("outcome",)),
    "valuspec_log_rows": ("Finished greedy requests offered to the trajectory log.", ("outcome",)),
    "valuspec_prompt_tokens": ("Prompt tokens.", ()),
    "valuspec_prefix_cache_hits": ("Prompt tokens found computed by an earlier request.", ()),
    "valuspec_num_preemptions": ("Requests that gave their place in the cache back.", ()),
    "valuspec_generation_tokens": ("Generated tokens.", ()),
    "valuspec_request_success": ("Finished choices.", ("finished_reason",)),
    "valuspec_requests_refused": ("Requests refused before generation.", ("status",)),
    "valuspec_refusals_repeated": ("Requests that a proxy refused as the one before.", ()),
    "valuspec_threshold_changes": ("Threshold sets taken into use.", ()),
    "valuspec_thresholds_refused": ("Threshold sets refused; the last good one stayed.", ()),
    "valuspec_threshold_rollbacks": ("Sets given up for being slower than plain decoding.", ()),
    "valuspec_thresholds_slow": ("Slow sets with nothing to go back to.", ()),
    "valuspec_speed_verdicts": ("Doubts about a set's speed, and how trials ended.", ("kind",)),
    "valuspec_threshold_polls_failed": ("Polls of the store that brought nothing.", ("reason",)),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "valuspec_retrieval_latency_seconds": ("Lookup as the replica sees it.", ("outcome",)),
    "valuspec_valuation_latency_seconds": ("Valuation of one request, all steps.", ()),
    "valuspec_time_to_first_token_seconds": ("From admission to the first token.", ()),
    "valuspec_inter_token_latency_seconds": ("Mean of a request.", ()),
    "valuspec_e2e_request_latency_seconds": ("From admission to the last token.", ()),
    "valuspec_request_queue_time_seconds": ("Time waiting for a place in the batch.", ()),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "valuspec_num_requests_running": ("Requests in the batch.", ()),
    "valuspec_num_requests_waiting": ("Requests waiting for the batch.", ()),
    "valuspec_kv_cache_usage": ("Share of the cache that running requests use.", ()),
    "valuspec_load": ("What autoscaling decides by: 1.0 is a replica in full use.", ()),
    "valuspec_exact": ("1 if output identity was proved by the start-up probe.", ()),
    "valuspec_threshold_version": ("1 for the version in use.", ("version",)),
}


class Telemetry:
    """Counters may be counted from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._metrics: dict[str, Any] = {}
        try:
            for name, (description, tags) in COUNTERS.items():
                self._metrics[name] = metrics.Counter(name, description, tag_keys=cast(Any, tags))
            for name, (description, tags) in GAUGES.items():
                self._metrics[name] = metrics.Gauge(name, description, tag_keys=cast(Any, tags))
            for name, (description, tags) in HISTOGRAMS.items():
                self._metrics[name] = metrics.Histogram(
                    name, description, _LATENCY_S, cast(Any, tags)
                )
        except Exception:
            # Measuring must never stop the serving.
            logger.exception("Ray metrics are not available; totals are kept in process only")
            self._metrics = {}

    def count(self, name: str, amount: float = 1, **tags: str) -> None:
        """Add to a counter of COUNTERS."""
        if amount:
            with self._lock:
                self._totals["_".join([name, *tags.values()])] += int(amount)
            if self._metrics:
                self._metrics[name].inc(amount, tags)

    def observe(self, name: str, seconds: float, **tags: str) -> None:
        """Add one observation to a histogram of HISTOGRAMS."""
        if self._metrics:
            self._metrics[name].observe(max(seconds, 0.0), tags)

    def gauge(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge of GAUGES."""
        if self._metrics:
            self._metrics[name].set(value, tags)

    def totals(self) -> dict[str, int]:
        """Counters since the replica started; tag values are appended to the names."""
        return dict(self._totals)

    def finished(self, report: ChoiceReport, finish_reason: str, e2e_s: float) -> None:
        """Count one finished choice."""
        stats = report.stats
        self.count("valuspec_request_success", finished_reason=finish_reason)
        self.count("valuspec_prompt_tokens", stats.num_prompt_tokens)
        self.count("valuspec_prefix_cache_hits", stats.num_cached_tokens)
        self.count("valuspec_num_preemptions", stats.num_preemptions)
        self.count("valuspec_generation_tokens", stats.num_output_tokens)
        self.count("valuspec_spec_decode_num_drafts", stats.num_steps)
        self.count("valuspec_spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self.count("valuspec_spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
        self.count("valuspec_tree_nodes_offered", stats.num_offered_nodes)
        self.count("valuspec_tree_nodes_kept", stats.num_draft_tokens)
        # A step that accepted k tokens accepted positions 0 to k - 1.
        reached = 0
        for k in range(min(len(stats.acceptance_histogram) - 1, MAX_POSITION), 0, -1):
            reached += stats.acceptance_histogram[k]
            self.count(
                "valuspec_spec_decode_num_accepted_tokens_per_pos", reached, position=str(k - 1)
            )
        self.observe("valuspec_time_to_first_token_seconds", report.time_to_first_token_s)
        self.observe("valuspec_e2e_request_latency_seconds", e2e_s)
        self.observe("valuspec_request_queue_time_seconds", stats.queue_s)
        self.observe("valuspec_valuation_latency_seconds", stats.valuation_s)
        if stats.num_output_tokens > 1:
            self.observe(
                "valuspec_inter_token_latency_seconds",
                stats.decode_s / (stats.num_output_tokens - 1),
            )
