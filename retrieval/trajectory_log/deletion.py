"""Deleting one tenant's rows from a trajectory log."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from retrieval.trajectory_log.codec import LogFileRejectedError, encode
from retrieval.trajectory_log.files import SUFFIX, UNFINISHED, log_files, own_files, write_whole
from retrieval.trajectory_log.reader import read_file

#: A file of ours that is damaged serves nobody, and what it holds cannot be told.
_WORTHLESS = {"empty", "truncated", "damaged"}


@dataclass(slots=True)
class Deletion:
    """What was done. With `unsearched` files left, the deletion is not complete."""

    num_rows: int = 0
    num_files: int = 0
    """Files rewritten or removed."""
    unsearched: list[Path] = field(default_factory=list)
    """Files of another format, too large or not readable; the operator must look at them."""


def delete_namespace(folder: str | Path, namespace: str) -> Deletion:
    """Remove a namespace's rows from every file of a folder, each rewritten whole or removed.

    First make sure that nothing more is written: opt the tenant out. A killed run leaves every
    file as it was or as it will be; run it again. Rows that break a rule are removed from files
    that have any, as are unfinished and damaged files: whose they are cannot be told. A writer
    at work on an unfinished file loses it and counts the rows. Raises OSError.
    """
    folder, done = Path(folder), Deletion()
    ours = set(own_files(folder, SUFFIX))
    for path in log_files([folder]):
        try:
            file = read_file(path)
        except LogFileRejectedError as error:
            if path in ours and error.reason in _WORTHLESS:
                path.unlink(missing_ok=True)
                done.num_files += 1
            else:
                done.unsearched.append(path)
            continue
        kept = [row for row in file.rows if row.namespace != namespace]
        if len(kept) == len(file.rows) and not file.invalid:
            continue
        if kept:
            write_whole(path, encode(kept, file.costs))
        else:
            path.unlink(missing_ok=True)
        done.num_rows += len(file.rows) - len(kept)
        done.num_files += 1
    for path in own_files(folder, UNFINISHED):
        path.unlink(missing_ok=True)
        done.num_files += 1
    return done
