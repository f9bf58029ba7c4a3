"""Processes of a Ray that a test started, told from those of other Rays on the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    pid: int

    @property
    def alive(self) -> bool:
        try:
            return self._stat()[0] not in "ZX"
        except OSError:
            return False

    @property
    def cpu_ticks(self) -> int:
        """Processor time used so far; 0 once it is gone."""
        try:
            fields = self._stat()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])

    @property
    def parent(self) -> int:
        return int(self._stat()[1])

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def rss_mib(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096 >> 20

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _stat(self) -> list[str]:
        """Fields of /proc/PID/stat behind the name, which may hold spaces."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()


def find(title: str, environment: str) -> list[Process]:
    """Those whose command line begins with `title` and whose environment holds NAME=value."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended, or is not ours
            continue
        if command.startswith(title.encode()) and environment.encode() in variables:
            found.append(Process(int(entry.name)))
    return found
