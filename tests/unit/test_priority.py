"""Threads that were there before get the lower priority too, and no process gets a higher one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deployments.priority import NICENESS

_PRIORITIES = """
import os, threading
from deployments.priority import give_way
os.nice({nice})
waits = threading.Event()
threads = [threading.Thread(target=waits.wait) for _ in range(3)]
threads[0].start(), threads[1].start()
assert give_way() == []
threads[2].start()
ids = [threading.get_native_id(), *(thread.native_id for thread in threads)]
print(*(os.getpriority(os.PRIO_PROCESS, thread) for thread in ids))
waits.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="priority belongs to a thread on Linux only")
@pytest.mark.parametrize("nice", [0, 5, 15])
def test_all_threads_give_way(nice: int) -> None:
    becomes = min(os.getpriority(os.PRIO_PROCESS, 0) + nice + NICENESS, 19)
    program = _PRIORITIES.format(nice=nice)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [str(becomes)] * 4, done.stderr
