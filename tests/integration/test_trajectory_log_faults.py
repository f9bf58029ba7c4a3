"""Trajectory logs on real disks that fill up, written by real processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from retrieval.trajectory_log import LogLimits, TrajectoryLog, read_log
from retrieval.trajectory_log.files import ABANDONED_AFTER_S
from tests.support.log_rows import logged

ROOT = Path(__file__).parents[2]
#: What every child begins with: a log of one row per file, and counts said line by line.
PRELUDE = """
    import json, os, queue, resource, sys
    from retrieval.trajectory_log import LogLimits, TrajectoryLog
    from tests.support.log_rows import logged

    said = queue.SimpleQueue()
    log = TrajectoryLog(
        sys.argv[1],
        limits=LogLimits(max_rows=1),
        count=lambda outcome, rows: rows and said.put(outcome),
    )
    def tell(*what):
        print(json.dumps(what), flush=True)
"""


@contextmanager
def child(folder: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(program)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> list[Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    return json.loads(line)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_costs_rows_leaves_no_half_file_and_logging_resumes(tmp_path) -> None:
    """The kernel refuses bytes beyond the quota, as it does on a full disk, in mid-file."""
    program = """
        log.add(logged(0))
        tell(said.get())
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        for number in range(1, 4):
            log.add(logged(number))
            tell(said.get(), sorted(os.listdir(sys.argv[1])))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        log.add(logged(4))
        tell(said.get())
        log.close()
        tell("closed")
    """
    with child(tmp_path, program) as process:
        assert heard(process) == ["written"]
        before = names(tmp_path)
        for _ in range(3):
            assert heard(process) == ["dropped_write", before]
        assert heard(process) == ["written"]
        assert heard(process) == ["closed"]
    read = read_log([tmp_path])
    assert [row.request_id for row in read.trajectories] == ["request-0", "request-4"]
    assert not read.skipped


def test_a_writer_killed_in_mid_file_leaves_no_file_that_counts_as_whole(tmp_path) -> None:
    program = """
        for number in range(3):
            log.add(logged(number))
            tell(said.get())
        fsync = os.fsync
        def hang(descriptor):
            os.ftruncate(descriptor, 1000)  # half of it has reached the disk
            tell("in mid-file")
            queue.SimpleQueue().get()
        os.fsync = hang
        log.add(logged(3))
        queue.SimpleQueue().get()
    """
    with child(tmp_path, program) as process:
        for _ in range(3):
            assert heard(process) == ["written"]
        assert heard(process) == ["in mid-file"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    (half,) = (path for path in tmp_path.iterdir() if path.suffix == ".tmp")
    assert half.stat().st_size == 1000
    read = read_log([tmp_path])
    assert [row.sequence for row in read.trajectories] == [1, 2, 3]
    assert not read.skipped

    # The next writer goes on behind it, and clears away what was left once it is surely dead.
    long_ago = half.stat().st_mtime - 2 * ABANDONED_AFTER_S
    os.utime(half, (long_ago, long_ago))
    log = TrajectoryLog(tmp_path, limits=LogLimits(max_rows=1))
    log.add(logged(4))
    log.close()
    assert [row.sequence for row in read_log([tmp_path]).trajectories] == [1, 2, 3, 4]
    assert not half.exists()


@pytest.mark.parametrize(
    ("moment", "rows", "unfinished"),
    [
        ("os.open = dead", 1, 0),
        ("os.fsync = dead", 1, 1),
        ("Path.rename = dead", 1, 1),
        ("files._sync_folder = dead", 2, 0),
    ],
)
def test_killed_between_any_two_steps_a_file_is_whole_or_not_there(
    tmp_path, moment, rows, unfinished
) -> None:
    program = f"""
        from pathlib import Path
        from retrieval.trajectory_log import files

        log.add(logged(0))
        tell(said.get())
        def dead(*arguments):
            os.kill(os.getpid(), 9)
        {moment}
        log.add(logged(1))
        queue.SimpleQueue().get()
    """
    with child(tmp_path, program) as process:
        assert heard(process) == ["written"]
        assert process.wait() == -signal.SIGKILL
    read = read_log([tmp_path])
    assert [row.sequence for row in read.trajectories] == list(range(1, rows + 1))
    assert not read.skipped
    assert len([name for name in names(tmp_path) if name.endswith(".tmp")]) == unfinished
