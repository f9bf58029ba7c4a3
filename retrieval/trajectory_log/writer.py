"""Writing a trajectory log beside the decoding, which must never notice.

Rows wait in memory, at most two files' worth; a thread of their own turns them into files. A
Parquet file is worth nothing before its footer is written, so a file is written at once, whole,
and a crash loses what waited. A disk that is full or slow costs rows, which are counted.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from retrieval.trajectory_log.codec import Costs, encode
from retrieval.trajectory_log.files import file_name, newest_sequence, retain, write_whole
from retrieval.trajectory_log.schema import LoggedTrajectory

_log = logging.getLogger(__name__)

RETAIN_EVERY_S = 3600.0
"""Retention runs with every file, and as often as this where nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """When a file is written, and how long files stay."""

    max_rows: int = 512
    """Rows of one file."""
    max_tokens: int = 2**21
    """Prompt and output tokens of one file."""
    max_seconds: float = 60.0
    """Longest time a row waits to be written."""
    max_bytes: int = 2**30
    """Of the whole folder, all replicas together."""
    max_age_s: float = 30 * 24 * 3600.0


class TrajectoryLog:
    """Appends rows to a folder, which several replicas may share. Starts a thread."""

    def __init__(
        self,
        folder: str | Path,
        *,
        limits: LogLimits | None = None,
        count: Callable[[str, int], None] = lambda outcome, rows: None,
    ) -> None:
        """count: told how many rows were `written`, `dropped_queue` (too many rows wait),
        `dropped_write` (the file could not be written) or `opted_out`; called from any thread."""
        self._folder = Path(folder)
        self._limits = limits or LogLimits()
        self._count = count
        self._writer = uuid.uuid4().hex[:12]
        self._sequence = 0
        self._failing = False
        self._pending: list[LoggedTrajectory] = []
        self._pending_tokens = 0
        self._due_at = 0.0
        self._closing = False
        self._changed = threading.Condition()
        self.opted_out: frozenset[str] = frozenset()
        """Namespaces of which nothing is written, nor what waits when they are added."""
        self.costs: Costs = {}
        """This machine's verify costs, stored with each file."""
        self._thread = threading.Thread(target=self._run, name="trajectory-log", daemon=True)
        self._thread.start()

    def add(self, row: LoggedTrajectory) -> None:
        """Queue a row; from any thread. Neither waits for the disk nor raises for it."""
        if row.namespace in self.opted_out:
            self._count("opted_out", 1)
            return
        with self._changed:
            fits = (
                not self._closing
                and len(self._pending) < 2 * self._limits.max_rows
                and self._pending_tokens < 2 * self._limits.max_tokens
            )
            if fits:
                if not self._pending:
                    self._due_at = time.monotonic() + self._limits.max_seconds
                self._pending.append(row)
                self._pending_tokens += len(row.prompt_ids) + len(row.output_ids)
                if len(self._pending) == 1 or self._due():
                    self._changed.notify()
        if not fits:
            self._count("dropped_queue", 1)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits and end the thread; gives up on a disk that takes longer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._write([])
        while not self._closing or self._pending:
            self._write(self._next_batch())

    def _next_batch(self) -> list[LoggedTrajectory]:
        """Wait until a file is full or due; empty when it is time for retention alone."""
        with self._changed:
            while not self._due():
                left = self._due_at - time.monotonic() if self._pending else RETAIN_EVERY_S
                if not self._changed.wait(left):
                    break
            batch, self._pending, self._pending_tokens = self._pending, [], 0
            return batch

    def _due(self) -> bool:
        return (
            self._closing
            or len(self._pending) >= self._limits.max_rows
            or self._pending_tokens >= self._limits.max_tokens
        )

    def _write(self, batch: list[LoggedTrajectory]) -> None:
        rows = [row for row in batch if row.namespace not in self.opted_out]
        self._count("opted_out", len(batch) - len(rows))
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            first = 1 + max(self._sequence, newest_sequence(self._folder))
            numbered = [
                replace(row, writer=self._writer, sequence=sequence)
                for sequence, row in enumerate(rows, first)
            ]
            blob = encode(numbered, self.costs) if numbered else b""
            limits = self._limits
            retain(self._folder, max_bytes=limits.max_bytes - len(blob), max_age_s=limits.max_age_s)
            if numbered:
                self._sequence = numbered[-1].sequence
                write_whole(self._folder / file_name(self._sequence, self._writer), blob)
        except Exception:  # noqa: BLE001 - whatever it is, the next file may succeed
            self._count("dropped_write", len(rows))
            if not self._failing:
                _log.exception("trajectory log %s: %d rows dropped", self._folder, len(rows))
            self._failing = True
        else:
            self._count("written", len(rows))
            self._failing = False
