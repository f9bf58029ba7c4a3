"""Threshold sets that differ, for tests that publish them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from valuspec.thresholds import ThresholdSet


def set_like_shipped(model: str, note: str) -> ThresholdSet:
    """The shipped set with a few of its counts only, so small; a version for each note."""
    shipped = ThresholdSet.starting(model)
    few = np.zeros_like(shipped.seen)
    few[np.flatnonzero(shipped.seen)[:32]] = 1
    return replace(
        shipped, seen=shipped.seen * few, taken=shipped.taken * few, provenance={"note": note}
    )
