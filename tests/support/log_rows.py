"""Made-up rows of a trajectory log."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrieval.trajectory_log import LoggedTrajectory


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def logged(number: int = 0, **changes: Any) -> LoggedTrajectory:
    """A request of two steps: 1 + (2 + 1) + (0 + 1) tokens."""
    fields: dict[str, Any] = {
        "request_id": f"request-{number}",
        "namespace": "space",
        "model_fingerprint": "model",
        "tokenizer_fingerprint": "tokenizer",
        "threshold_version": "v1",
        "finish_reason": "stop",
        "max_tokens": 16,
        "prompt_ids": ids(1, 2, number),
        "output_ids": ids(7, 8, 9, 10, number),
        "kept": ids(4, 0),
        "accepted": ids(2, 0),
        "batch_size": ids(1, 2),
        "queue_s": 0.001,
        "prefill_s": 0.02,
        "decode_s": 0.1,
        "forward_s": 0.09,
        "draft_s": 0.002,
        "valuation_s": 0.001,
        "finished_at": 1.7e9,
        "writer": "w",
        "sequence": number + 1,
    }
    return LoggedTrajectory(**fields | changes)


def content(row: LoggedTrajectory) -> dict[str, Any]:
    """Fields as comparable values."""
    return {
        name: value.tolist() if isinstance(value := getattr(row, name), np.ndarray) else value
        for name in LoggedTrajectory.__dataclass_fields__
    }
