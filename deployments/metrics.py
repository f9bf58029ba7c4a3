"""Per-request numbers in the response body.

`speculative_decoding` and its timing siblings have vLLM's shape, so its benchmark tools read them;
what a draft tree adds stands apart under `valuspec`. `num_draft_tokens` counts verified nodes and
`num_spec_tokens` is the largest number accepted in one step, since nodes of a tree are not depth.
"""

from __future__ import annotations

from typing import Any

from deployments.messages import ChoiceReport


def response_metrics(report: ChoiceReport) -> dict[str, Any]:
    """The `metrics` object of a response with one choice."""
    stats, retrieval = report.stats, report.retrieval
    generation_s = stats.prefill_s + stats.decode_s
    inter_token_s = stats.decode_s / max(stats.num_output_tokens - 1, 1)
    histogram = list(stats.acceptance_histogram)
    while len(histogram) > 1 and histogram[-1] == 0:
        histogram.pop()
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + _ratio(stats.num_accepted_tokens, stats.num_steps),
            "draft_acceptance_rate": _ratio(stats.num_accepted_tokens, stats.num_draft_tokens),
            "acceptance_histogram": histogram,
            "num_spec_steps": stats.num_steps,
            "num_accepted_draft_tokens": stats.num_accepted_tokens,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": len(histogram) - 1,
        },
        "time_to_first_token_ms": _ms(report.time_to_first_token_s),
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(stats.queue_s),
        "mean_itl_ms": _ms(inter_token_s),
        "tokens_per_second": round(_ratio(stats.num_output_tokens, generation_s), 2),
        "valuspec": {
            "num_offered_nodes": stats.num_offered_nodes,
            "num_kept_nodes": stats.num_draft_tokens,
            "retrieval_outcome": retrieval.outcome,
            "retrieval_ms": _ms(retrieval.latency_s),
            "num_retrieved_trees": retrieval.num_trees,
            "num_retrieved_nodes": retrieval.num_stored_nodes,
            "num_retrieved_nodes_kept": retrieval.num_nodes,
            "retrieval_valuation_ms": _ms(retrieval.valuation_s),
            "draft_ms": _ms(stats.draft_s),
            "valuation_ms": _ms(stats.valuation_s),
            "forward_ms": _ms(stats.forward_s),
            "threshold_version": stats.threshold_version,
        },
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
