"""Writing trajectory logs: rotation, retention, a full queue, opt-out, deletion."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from retrieval.trajectory_log import (
    LogLimits,
    TrajectoryLog,
    delete_namespace,
    log_files,
    read_log,
    writer,
)
from retrieval.trajectory_log.codec import encode
from retrieval.trajectory_log.files import file_name, retain, write_whole
from tests.support.log_rows import logged
from valuspec.cost import CostStaircase

PATIENCE_S = 30  # nothing waits this long unless it hangs


class Counts:
    """Counts outcomes and lets a test wait for one."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self._changed = threading.Condition()

    def __call__(self, outcome: str, rows: int) -> None:
        with self._changed:
            self.of[outcome] += rows
            self._changed.notify_all()

    def wait(self, outcome: str, rows: int) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: self.of[outcome] >= rows, PATIENCE_S)
        assert reached, f"{outcome}: {self.of}"


@contextmanager
def writing(folder: Path, counts: Counts | None = None, **limits) -> Iterator[TrajectoryLog]:
    log = TrajectoryLog(folder, limits=LogLimits(**limits), count=counts or Counts())
    yield log
    log.close(PATIENCE_S)
    assert not log._thread.is_alive()


def sequences(folder: Path) -> list[int]:
    return [row.sequence for row in read_log([folder]).trajectories]


def sizes(folder: Path) -> list[int]:
    """Rows of each file, oldest first."""
    return [len(read_log([path]).trajectories) for path in log_files([folder])]


# -- files


def test_files_rotate_by_rows_and_the_rest_is_written_at_the_end(tmp_path) -> None:
    counts = Counts()
    with writing(tmp_path / "log", counts, max_rows=3) as log:
        for number in range(3):
            log.add(logged(number))
        counts.wait("written", 3)
        log.add(logged(3))
        assert sizes(tmp_path / "log") == [3]
    assert sizes(tmp_path / "log") == [3, 1]
    read = read_log([tmp_path / "log"])
    assert [row.request_id for row in read.trajectories] == [f"request-{i}" for i in range(4)]
    assert [row.sequence for row in read.trajectories] == [1, 2, 3, 4]
    assert not read.skipped


def test_rows_that_come_after_the_end_are_counted(tmp_path) -> None:
    counts = Counts()
    with writing(tmp_path, counts) as log:
        log.add(logged(0))
    log.add(logged(1))
    assert counts.of == {"opted_out": 0, "written": 1, "dropped_queue": 1}


def test_files_rotate_by_tokens_and_by_seconds(tmp_path) -> None:
    counts = Counts()
    with writing(tmp_path / "tokens", counts, max_tokens=16) as log:
        for number in range(2):  # of 8 tokens each
            log.add(logged(number))
        counts.wait("written", 2)
    with writing(tmp_path / "seconds", counts, max_seconds=0.01) as log:
        log.add(logged())
        counts.wait("written", 3)


def test_prompts_are_for_the_owner_only(tmp_path) -> None:
    folder = tmp_path / "log"
    with writing(folder) as log:
        log.add(logged())
    (file,) = log_files([folder])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_costs_of_the_machine_are_stored_with_the_rows(tmp_path) -> None:
    with writing(tmp_path) as log:
        log.costs = {1: CostStaircase((1, 2), (0.1, 0.2))}
        log.add(logged())
    assert read_log([tmp_path]).costs == log.costs


def test_a_later_writer_continues_the_order_without_looking_at_clocks(tmp_path) -> None:
    for start in (0, 10):
        with writing(tmp_path, max_rows=2) as log:
            for number in range(start, start + 3):
                log.add(logged(number))
        for path in log_files([tmp_path]):
            os.utime(path, (0, 2e9 - start * 1e8))  # the clock went backwards in between
    read = read_log([tmp_path]).trajectories
    assert [row.prompt_ids[2] for row in read] == [0, 1, 2, 10, 11, 12]
    assert len({row.writer for row in read}) == 2
    assert sequences(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_writers_share_a_folder(tmp_path) -> None:
    with writing(tmp_path, max_rows=5) as one, writing(tmp_path, max_rows=5) as other:
        for number in range(8):
            one.add(logged(number))
            other.add(logged(number))
    read = read_log([tmp_path])
    assert Counter(row.writer for row in read.trajectories) == {one._writer: 8, other._writer: 8}
    assert not read.skipped


# -- retention


def test_the_oldest_files_go_when_the_folder_is_full(tmp_path) -> None:
    size = len(encode([logged()], {}))
    counts = Counts()
    with writing(tmp_path, counts, max_rows=1, max_bytes=4 * size) as log:
        for number in range(12):
            log.add(logged(number))
            counts.wait("written", number + 1)
            assert sum(path.stat().st_size for path in log_files([tmp_path])) <= 4 * size
    assert sequences(tmp_path)[-1] == 12
    assert len(sequences(tmp_path)) >= 3
    assert sequences(tmp_path) == list(range(sequences(tmp_path)[0], 13))


def test_old_and_abandoned_files_go_others_are_left_alone(tmp_path) -> None:
    now = time.time()
    ages = {
        file_name(1, "0" * 12): 11.0,
        file_name(2, "0" * 12): 9.0,
        file_name(3, "0" * 12): -5000.0,  # the clock has been set back since
        file_name(4, "0" * 12) + ".tmp": 3601.0,
        file_name(5, "0" * 12) + ".tmp": 60.0,
        "somebody-elses.parquet": 1e6,
        "notes.txt": 1e6,
    }
    for name, age in ages.items():
        (tmp_path / name).write_bytes(b"12345")
        os.utime(tmp_path / name, (now - age, now - age))
    retain(tmp_path, max_bytes=100, max_age_s=10)
    left = {path.name for path in tmp_path.iterdir()}
    assert set(ages) - left == {file_name(1, "0" * 12), file_name(4, "0" * 12) + ".tmp"}


def test_retention_runs_at_the_start(tmp_path) -> None:
    write_whole(tmp_path / file_name(7, "0" * 12), encode([logged()], {}))
    with writing(tmp_path, max_bytes=10):
        pass
    assert log_files([tmp_path]) == []


# -- a disk that fails or hangs


def test_a_slow_disk_costs_rows_and_never_the_caller(tmp_path, monkeypatch) -> None:
    """The disk hangs in the middle of a write; `add` is called from the thread that serves."""
    stuck, released = threading.Event(), threading.Event()

    def hanging(path: Path, blob: bytes) -> None:
        stuck.set()
        assert released.wait(PATIENCE_S)
        write_whole(path, blob)

    monkeypatch.setattr(writer, "write_whole", hanging)
    counts = Counts()
    with writing(tmp_path, counts, max_rows=4) as log:
        for number in range(4):
            log.add(logged(number))
        assert stuck.wait(PATIENCE_S)
        for number in range(4, 30):
            log.add(logged(number))  # returns, or the test hangs
        assert counts.of == {"opted_out": 0, "written": 0, "dropped_queue": 26 - 8}
        log.close(timeout_s=0.01)  # a replica that stops does not wait for the disk either
        released.set()
    assert [row.prompt_ids[2] for row in read_log([tmp_path]).trajectories] == list(range(12))


def test_a_file_that_cannot_be_written_costs_its_rows_only(tmp_path) -> None:
    folder, counts = tmp_path / "log", Counts()
    folder.write_text("in the way")
    with writing(folder, counts, max_rows=2) as log:
        log.add(logged(0))
        log.add(logged(1))
        counts.wait("dropped_write", 2)
        folder.unlink()
        log.add(logged(2))
        log.add(logged(3))
        counts.wait("written", 2)
    assert sizes(folder) == [2]


def test_a_row_that_cannot_be_encoded_does_not_end_the_log(tmp_path) -> None:
    counts = Counts()
    with writing(tmp_path, counts, max_rows=1) as log:
        log.add(logged(0, prompt_ids=np.array(["no", "ids"])))
        counts.wait("dropped_write", 1)
        log.add(logged(1))
    assert sequences(tmp_path) == [1]


# -- tenants


def test_nothing_is_written_of_a_tenant_that_opted_out(tmp_path) -> None:
    counts = Counts()
    with writing(tmp_path, counts) as log:
        log.add(logged(0, namespace="theirs"))  # waits to be written when they opt out
        log.opted_out = frozenset({"theirs"})
        log.add(logged(1, namespace="theirs"))
        log.add(logged(2, namespace="ours"))
    assert [row.namespace for row in read_log([tmp_path]).trajectories] == ["ours"]
    assert counts.of["opted_out"] == 2
    assert all(b"theirs" not in path.read_bytes() for path in tmp_path.iterdir())


def test_deletion_removes_a_namespace_from_every_file_and_nothing_else(tmp_path) -> None:
    costs = {1: CostStaircase((1, 2), (0.1, 0.2))}
    spaces = [["theirs", "ours"], ["ours", "ours"], ["theirs", "theirs"]]
    for place, names in enumerate(spaces):
        rows = [logged(2 * place + i, namespace=name) for i, name in enumerate(names)]
        write_whole(tmp_path / file_name(2 * place + 2, "0" * 12), encode(rows, costs))
    write_whole(tmp_path / "given-by-hand.parquet", encode([logged(9, namespace="theirs")], {}))
    untouched = tmp_path / file_name(4, "0" * 12)
    before = untouched.stat().st_ino

    done = delete_namespace(tmp_path, "theirs")
    assert (done.num_rows, done.num_files, done.unsearched) == (4, 3, [])
    read = read_log([tmp_path])
    assert [row.sequence for row in read.trajectories] == [2, 3, 4]
    assert {row.namespace for row in read.trajectories} == {"ours"}
    assert read.costs == costs
    assert all(b"theirs" not in path.read_bytes() for path in tmp_path.iterdir())
    assert untouched.stat().st_ino == before
    assert delete_namespace(tmp_path, "theirs").num_files == 0


def test_deletion_leaves_nothing_that_it_could_not_search_unsaid(tmp_path) -> None:
    blob = encode([logged(0, namespace="theirs")], {})
    (tmp_path / file_name(1, "0" * 12)).write_bytes(blob[:-5])  # damaged: nobody can use it
    (tmp_path / (file_name(2, "0" * 12) + ".tmp")).write_bytes(blob[:50])
    (tmp_path / "foreign.parquet").write_bytes(b"something")
    broken = [logged(2, namespace="ours"), logged(3, finish_reason="theirs")]
    write_whole(tmp_path / file_name(4, "0" * 12), encode(broken, {}))
    done = delete_namespace(tmp_path, "theirs")
    assert done.unsearched == [tmp_path / "foreign.parquet"]
    assert sorted(tmp_path.iterdir()) == [tmp_path / file_name(4, "0" * 12), *done.unsearched]
    assert not read_log([tmp_path / file_name(4, "0" * 12)]).skipped


def test_a_deletion_that_is_killed_leaves_whole_files_and_can_be_repeated(
    tmp_path, monkeypatch
) -> None:
    for place in range(3):
        rows = [logged(2 * place, namespace="theirs"), logged(2 * place + 1, namespace="ours")]
        write_whole(tmp_path / file_name(2 * place + 2, "0" * 12), encode(rows, {}))

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_namespace(tmp_path, "theirs")
    assert len(read_log([tmp_path]).trajectories) == 6
    assert delete_namespace(tmp_path, "theirs").num_rows == 3
    assert {row.namespace for row in read_log([tmp_path]).trajectories} == {"ours"}
