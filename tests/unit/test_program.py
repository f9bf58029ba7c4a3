"""Programs: every step ends on all threads before the next begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from valuspec.engine import row_kernels, team
from valuspec.engine.program import Program, Step
from valuspec.engine.row_kernels import RowsCopy

pytestmark = pytest.mark.usefixtures("threads_of_torch")
ROWS, SIZE, STEPS = 37, 96, 300


def relay(buffers: np.ndarray) -> tuple[Program, np.ndarray]:
    """A program that copies each buffer to the next, and its arguments."""
    copies = np.zeros(len(buffers) - 1, np.dtype(RowsCopy))
    copies["x"] = [b.ctypes.data for b in buffers[:-1]]
    copies["y"] = [b.ctypes.data for b in buffers[1:]]
    copies["num_rows"], copies["size"], copies["width"] = ROWS, SIZE, SIZE
    steps = [Step(row_kernels.entry(RowsCopy), copies, i) for i in range(len(copies))]
    return Program(steps), copies


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["openmp", "pool"])
def test_a_step_sees_all_that_came_before(
    kind: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more threads than cores, some of which then wait for a core."""
    if kind == "pool":
        monkeypatch.setattr(team, "_team", lambda: team._run_in_pool)
    torch.set_num_threads(num_threads)
    buffers = np.zeros((STEPS + 1, ROWS, SIZE), np.int16)
    program, copies = relay(buffers)
    for value in range(1, 20):  # what a step reads too early is the last round's
        copies["taken"] = 0
        buffers[0] = value
        program.run(num_threads)
        assert (buffers == value).all()


def test_a_program_keeps_what_it_points_to() -> None:
    buffers = np.ones((3, ROWS, SIZE), np.int16)
    buffers[1:] = 0
    program = relay(buffers)[0]  # nothing else holds the arguments
    np.full(1 << 16, 255, np.uint8)
    program.run(1)
    assert buffers.all()


def test_the_team_is_as_large_as_torchs_threads_are_many() -> None:
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert team.size() == num_threads


def test_a_team_that_stays_small_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fewer threads come than were asked for, waiting for the others would never end."""
    torch.set_num_threads(3)
    monkeypatch.setattr(
        team, "_team", lambda: lambda work, argument, _: team.run(work, argument, 1)
    )
    team._size.cache_clear()
    assert team.size() == 1
    team._size.cache_clear()
