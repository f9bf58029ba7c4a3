"""Compiled work on several threads: every thread works, and the bits do not tell how many."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import numpy as np
import pytest
import torch

from tests.support.tiny_models import tiny_target
from valuspec.engine import path_attention, team
from valuspec.engine.kv_cache import own_blocks
from valuspec.engine.rows import SequenceRows

pytestmark = pytest.mark.usefixtures("threads_of_torch")


@pytest.fixture(params=["openmp", "pool"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pool":
        monkeypatch.setattr(team, "_team", lambda: team._run_in_pool)
    return str(request.param)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_as_many_threads_work_as_are_asked_for(kind: str, num_threads: int) -> None:
    seen: list[tuple[int, int]] = []
    all_here = threading.Barrier(num_threads, timeout=30)

    def work(argument: int) -> None:
        seen.append((threading.get_native_id(), argument))
        all_here.wait()

    torch.set_num_threads(num_threads)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    team.run(address, 42, num_threads)
    assert len({thread for thread, _ in seen}) == num_threads
    assert {argument for _, argument in seen} == {42}
    assert threading.get_native_id() in {thread for thread, _ in seen}


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GCC's OpenMP library on Linux")
def test_on_linux_they_are_torchs_own() -> None:
    """Threads of ours would take the cores that torch's wait on."""
    assert team._team() is not team._run_in_pool


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads to cores")
@pytest.mark.parametrize("fewer", [0, 1])
def test_a_bound_team_has_a_core_for_each_thread(fewer: int) -> None:
    """Where it takes all cores; a smaller team stays free to move."""
    cores = os.sched_getaffinity(0)
    num_threads = max(1, len(cores) - fewer)
    found: list[set[int]] = []
    all_here = threading.Barrier(num_threads, timeout=30)

    def work(_: int) -> None:
        found.append(os.sched_getaffinity(0))
        all_here.wait()

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None

    def master() -> None:
        torch.set_num_threads(num_threads)
        team.bind()
        team.run(address, 0, num_threads)

    # On a thread of its own, whose team ends with it.
    thread = threading.Thread(target=master)
    thread.start()
    thread.join()
    if num_threads == len(cores):
        assert sorted(map(tuple, found)) == [(core,) for core in sorted(cores)]
    else:
        assert found == [cores] * num_threads
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_do_not_depend_on_the_threads(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama", dtype=dtype)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 200, length) for length in (300, 5, 130)]
    monkeypatch.setattr(path_attention, "_KEYS_FOR_TEAM", 0)

    def logits(num_threads: int) -> torch.Tensor:
        torch.set_num_threads(num_threads)
        cache = target.new_cache(own_blocks(len(prompts), 512))
        rows = [SequenceRows.chain(i, 0, prompt) for i, prompt in enumerate(prompts)]
        return target.forward(rows, cache, np.arange(sum(map(len, prompts))))

    alone = logits(1)
    for num_threads in (2, 3):
        assert torch.equal(alone, logits(num_threads))
