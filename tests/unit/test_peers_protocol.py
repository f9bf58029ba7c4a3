"""bench.peers: a worker is a process that answers a message a line, and may fail or die."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.client import Worker, WorkerError

PARROT = Path(__file__).parents[1] / "support" / "parrot_worker.py"
LIMITS = {"max_tokens": 4, "stop_ids": [2], "options": {}}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    parrot = Worker([sys.executable, str(PARROT)], dict(os.environ), tmp_path / "log" / "parrot")
    yield parrot
    parrot.close()


def test_a_worker_answers_on_a_clean_line_whatever_its_library_prints(worker) -> None:
    assert worker.ask("load", model="m", threads=1, options={}) == {"versions": {"parrot": "1.0"}}
    assert worker.ask("history", earlier=[[[1], [2]]], calibration=[]) == {}
    assert worker.ask("stock", count=5, options={}) == {"how": "1 kept"}


def test_one_stream_is_timed_prompt_by_prompt_and_several_as_a_whole(worker) -> None:
    prompts = [[5, 6], [7]]
    alone = worker.ask("generate", prompts=prompts, streams=1, **LIMITS)
    together = worker.ask("generate", prompts=prompts, streams=8, **LIMITS)
    assert [len(reply["seconds"]) for reply in (alone, together)] == [2, 1]
    for reply in (alone, together):
        assert reply["outputs"] == prompts, "the stop token is not part of an answer"
        assert (reply["drafted"], reply["accepted"]) == (4, 2)
        assert reply["peak_bytes"] > 1_000_000


def test_a_refused_message_leaves_the_worker_alive(worker) -> None:
    with pytest.raises(WorkerError, match="a number it does not like"):
        worker.ask("generate", prompts=[[666]], streams=1, **LIMITS)
    with pytest.raises(WorkerError, match="unknown op"):
        worker.ask("dance")
    assert worker.ask("generate", prompts=[[5]], streams=1, **LIMITS)["outputs"] == [[5]]


def test_a_dead_worker_is_named_with_its_last_words(worker) -> None:
    with pytest.raises(WorkerError, match=r"the worker ended; .*last words"):
        worker.ask("generate", prompts=[[999]], streams=1, **LIMITS)
    with pytest.raises(WorkerError):
        worker.ask("stock", count=0, options={})
