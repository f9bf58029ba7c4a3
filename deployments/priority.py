"""The model comes first: processes that carry requests give way to those that compute answers.

Where the model computes on the CPU, both of its threads wait for each other after every product of
matrices. Whatever takes one core for a moment stops both.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

#: What `nice` adds. A process that wants a core then gets a tenth of what one without it gets.
NICENESS = 10
_LAST = 19
_THREADS = Path("/proc/self/task")


def give_way() -> list[Any]:
    """Lower the priority of this process, threads that it has already begun included.

    Serve calls it in its proxies (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH) and wants a list of
    middlewares back: there are none.
    """
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, _LAST)
    # On Linux priority belongs to a thread; elsewhere 0, this process, stands for all of them.
    threads = [int(path.name) for path in _THREADS.iterdir()] if _THREADS.exists() else [0]
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            mine = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(mine, niceness))
    return []
