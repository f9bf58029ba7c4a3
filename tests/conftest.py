"""Settings every test needs before anything is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# A local Ray would otherwise write a token into the home folder.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# No test may reach a model hub: what it needs is installed or made on the spot.
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton kernels run in its interpreter, on the CPU. It looks when it is imported.
os.environ["TRITON_INTERPRET"] = "1"
# Whatever the developer has set must not decide a test.
for name in (
    "REDIS_URL",
    "VALUSPEC_JOBS_REDIS_URL",
    "VALUSPEC_API_KEYS",
    "VALUSPEC_API_KEYS_FILE",
):
    os.environ.pop(name, None)

#: Folders of tests with real processes. They run one after the other, beside the other tests.
WITH_PROCESSES = {"contract", "faults", "integration"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests one worker runs in order: a file's, and all those with real processes."""
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        group = "processes" if path.parts[0] in WITH_PROCESSES else path.stem
        item.add_marker(pytest.mark.xdist_group(group))
