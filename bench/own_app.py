"""An app of one's own to measure, with an empty store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.ports import free_port
from retrieval.embedded import EmbeddedValkey
from valuspec.errors import ValuSpecError

#: A first start compiles kernels.
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class OwnApp:
    """A running app. `pid` is of the process that all others descend from."""

    url: str
    pid: int

    def memory_mb(self) -> float:
        """Resident memory of all processes; what several of them share counts several times."""
        return sum(map(_resident_bytes, _family(self.pid))) / 2**20


@contextlib.contextmanager
def own_app(*options: str) -> Iterator[OwnApp]:
    """`valuspec serve` with these options, on a free port of this machine.

    Its Valkey is new and gone afterwards, so nothing that was answered before is met again.
    Raises ValuSpecError when the app does not start.
    """
    port = free_port()
    command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port), *options]
    with EmbeddedValkey() as valkey:
        environment = os.environ | {"REDIS_URL": valkey.url}
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
        try:
            app = OwnApp(f"http://127.0.0.1:{port}", process.pid)
            _wait_until_ready(process, app.url)
            yield app
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ValuSpecError(f"the app ended with code {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise ValuSpecError(f"the app was not ready within {START_TIMEOUT_S:g} s")


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            # Behind the name, which may hold anything, come the state and the parent.
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
