"""What a trajectory log holds: one row per finished greedy request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

MAX_TEXT = 256
"""Longest string of a row, in characters."""

_IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_COLUMNS = {
    "request_id": pa.string(),
    "namespace": pa.string(),
    "model_fingerprint": pa.string(),
    "tokenizer_fingerprint": pa.string(),
    "threshold_version": pa.string(),
    "finish_reason": pa.string(),
    "max_tokens": pa.int64(),
    "prompt_ids": _IDS,
    "output_ids": _IDS,
    "kept": _IDS,
    "accepted": _IDS,
    "batch_size": _IDS,
    "queue_s": pa.float64(),
    "prefill_s": pa.float64(),
    "decode_s": pa.float64(),
    "forward_s": pa.float64(),
    "draft_s": pa.float64(),
    "valuation_s": pa.float64(),
    "finished_at": pa.float64(),
    "writer": pa.string(),
    "sequence": pa.int64(),
}
SCHEMA_VERSION = 1
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS.items()])
"""Pinned: a file with other columns is refused. A change needs a new SCHEMA_VERSION."""

_TEXTS = [name for name, kind in _COLUMNS.items() if kind == pa.string()]
_TIMES = [name for name, kind in _COLUMNS.items() if kind == pa.float64()]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedTrajectory:
    """A greedy answer of the target, and what its steps cost and brought.

    Token ids, never text. Times are seconds. Rows are ordered by (sequence, writer): `sequence`
    is a logical clock, above that of every row that lay in the folder when the row was written.
    `finished_at` is for people; clocks jump, so nothing is ordered by it.
    """

    request_id: str
    namespace: str
    """Tenant, model and tokenizer; see `retrieval.namespace`."""
    model_fingerprint: str
    tokenizer_fingerprint: str
    threshold_version: str
    """The set that chose which nodes to verify."""
    finish_reason: Literal["stop", "length"]
    max_tokens: int
    prompt_ids: IntArray
    output_ids: IntArray
    """Ends with the stop token if one ended the answer."""
    kept: IntArray
    """Nodes verified, int32 [num_steps]. Prefill yields the first token and is no step."""
    accepted: IntArray
    """Draft tokens accepted, bonus token excluded, int32 [num_steps]."""
    batch_size: IntArray
    """Requests that shared the forward, this one included, int32 [num_steps]."""
    queue_s: float
    prefill_s: float
    decode_s: float
    forward_s: float
    draft_s: float
    valuation_s: float
    finished_at: float
    """Unix seconds."""
    writer: str = ""
    """Random name of the writer; (writer, sequence) names the row. Both are set when written."""
    sequence: int = 0

    def validate(self) -> LoggedTrajectory:
        """Return self, or raise ValueError naming the first rule the row breaks."""
        num_steps = len(self.accepted)
        rules = [
            ("finish_reason", self.finish_reason in ("stop", "length")),
            ("text too long", all(len(getattr(self, name)) <= MAX_TEXT for name in _TEXTS)),
            ("times", all(0 <= getattr(self, name) < math.inf for name in _TIMES)),
            ("empty prompt", len(self.prompt_ids) > 0),
            ("output length", 1 <= len(self.output_ids) <= self.max_tokens),
            ("negative token id", _least(self.prompt_ids) >= 0 and _least(self.output_ids) >= 0),
            ("number of steps", len(self.kept) == num_steps == len(self.batch_size)),
            ("batch_size", _least(self.batch_size) >= 1),
            ("accepted", _least(self.accepted) >= 0),
        ]
        for name, holds in rules:
            if not holds:
                raise ValueError(name)
        if np.any(self.accepted > self.kept):
            raise ValueError("more accepted than kept")
        # The last step may have reached past the end of the answer, no other may.
        most = 1 + num_steps + int(self.accepted.sum())
        last = 1 + int(self.accepted[-1]) if num_steps else 1
        if not most - last < len(self.output_ids) <= most:
            raise ValueError("steps do not add up to the output")
        return self


def _least(array: IntArray) -> int:
    return int(array.min(initial=1))
