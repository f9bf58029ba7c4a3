"""How many random histories a test tries."""

from __future__ import annotations

import os


def num_histories(usual: int) -> int:
    """`usual`, or what the environment variable VALUSPEC_HISTORIES says."""
    return int(os.environ.get("VALUSPEC_HISTORIES", usual))
