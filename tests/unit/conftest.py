"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where others keep the cores busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    """For tests that set how many threads torch has: afterwards it has what it had."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
