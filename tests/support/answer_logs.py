"""Trajectory logs of made-up answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retrieval.trajectory_log.codec import encode
from tests.support.log_rows import logged
from tests.support.trajectories import COST
from valuspec.replay import Trajectory


def write_log(folder: Path, answers: Sequence[Trajectory], rows_per_file: int = 25) -> None:
    """As replicas would have logged these answers, decoded without drafts, one at a time."""
    rows = []
    for number, t in enumerate(answers):
        none = np.zeros(len(t.output_ids) - 1, np.int32)
        rows.append(
            logged(
                number,
                namespace=t.namespace,
                max_tokens=t.max_tokens,
                prompt_ids=t.prompt_ids,
                output_ids=t.output_ids,
                kept=none,
                accepted=none,
                batch_size=none + 1,
            )
        )
    for start in range(0, len(rows), rows_per_file):
        blob = encode(rows[start : start + rows_per_file], {1: COST})
        (folder / f"{start:06}.parquet").write_bytes(blob)
