"""Reading trajectory logs: whatever is readable, with the rest counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from retrieval.trajectory_log.codec import MAX_FILE_BYTES, LogFile, LogFileRejectedError, decode
from retrieval.trajectory_log.files import log_files
from retrieval.trajectory_log.schema import LoggedTrajectory
from valuspec.cost import CostStaircase

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogRead:
    """What log files held.

    trajectories: in the order they were logged
    costs:        the newest file's verify costs, by largest batch size; empty if none has any
    skipped:      `file.<reason>` and `row.<reason>`, see `codec`; `row.duplicate` and
                  `row.other_model` are no faults
    """

    trajectories: list[LoggedTrajectory] = field(default_factory=list)
    costs: dict[int, CostStaircase] = field(default_factory=dict)
    files_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def read_log(paths: Iterable[str | Path], *, model_fingerprint: str | None = None) -> LogRead:
    """Read log files and folders of them; never raises for what it finds there.

    model_fingerprint: leave out, and count, other models' rows and costs
    """
    read: dict[tuple[int, str], LoggedTrajectory] = {}
    costs: dict[int, CostStaircase] = {}
    newest = (-1, "")
    skipped: Counter[str] = Counter()
    files_read = 0
    for path in log_files(paths):
        try:
            file = read_file(path)
        except LogFileRejectedError as error:
            _log.warning("%s skipped: %s", path, error)
            skipped[f"file.{error.reason}"] += 1
            continue
        files_read += 1
        for rule, count in file.invalid.items():
            skipped[f"row.{rule}"] += count
        rows = [r for r in file.rows if model_fingerprint in (None, r.model_fingerprint)]
        skipped["row.other_model"] += len(file.rows) - len(rows)
        for row in rows:
            key = (row.sequence, row.writer)
            skipped["row.duplicate"] += key in read
            read.setdefault(key, row)
            if file.costs and key > newest:
                newest, costs = key, file.costs
    return LogRead([read[key] for key in sorted(read)], costs, files_read, +skipped)


def read_file(path: Path) -> LogFile:
    """Content of one file. Raises LogFileRejectedError."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise LogFileRejectedError("unreadable", "no such file, or not an ordinary one")
        with path.open("rb") as file:
            # One byte more than allowed tells a giant without reading it.
            blob = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise LogFileRejectedError("unreadable", str(error)) from error
    return decode(blob)
