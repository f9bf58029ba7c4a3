"""Threshold sets that differ, for tests that publish them."""

from __future__ import annotations

from dataclasses import replace

from valuspec.thresholds import ThresholdSet


def set_like_shipped(model: str, note: str) -> ThresholdSet:
    """The shipped set under another version, for each note its own."""
    return replace(ThresholdSet.starting(model), provenance={"note": note})
