"""The folder of a trajectory log: names, whole-file writes, retention.

A file is named `<greatest sequence in it>-<writer>.parquet`, so names sort in the order of rows.
It appears under its name complete and synced to disk, or not at all.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".parquet"
UNFINISHED = ".tmp"
ABANDONED_AFTER_S = 3600.0
"""An unfinished file of this age belongs to a writer that was killed."""

_NAME = re.compile(r"(\d{12})-[0-9a-f]{12}\.parquet(\.tmp)?")


def file_name(sequence: int, writer: str) -> str:
    return f"{sequence:012d}-{writer}{SUFFIX}"


def log_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files to read: those given, and of a folder its *.parquet, not those of subfolders."""
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    return found


def own_files(folder: Path, suffix: str) -> list[Path]:
    """Files named as writers name them, finished (SUFFIX) or not (UNFINISHED), in order."""
    return sorted(p for p in folder.glob(f"*{suffix}") if _NAME.fullmatch(p.name))


def newest_sequence(folder: Path) -> int:
    """Greatest sequence of a finished file; 0 in an empty folder."""
    return max((int(path.name[:12]) for path in own_files(folder, SUFFIX)), default=0)


def write_whole(path: Path, blob: bytes) -> None:
    """Write, sync and rename; on OSError nothing is left behind. Readable by the owner only."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(descriptor)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def retain(folder: Path, *, max_bytes: int, max_age_s: float) -> None:
    """Delete the oldest files until the rest fits, files too old, and what killed writers left.

    Age alone is by the wall clock: a clock that jumps makes files go early or late by as much.
    """
    now = time.time()
    for path in own_files(folder, UNFINISHED):
        if _age(path, now) > ABANDONED_AFTER_S:
            path.unlink(missing_ok=True)
    room = max_bytes
    for path in reversed(own_files(folder, SUFFIX)):
        room -= _size(path)
        if room < 0 or _age(path, now) > max_age_s:
            path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another replica's retention was faster
        return 0


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
