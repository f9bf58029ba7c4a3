"""Ports for servers that a bench or a test starts."""

from __future__ import annotations

import random
import socket

#: Above the ports of Ray's workers, below those that systems give to outgoing connections: one of
#: the latter may be somebody's again before the server has come up.
_RANGE = range(20000, 32000)


def free_port() -> int:
    """A port of this machine that nothing listens on just now."""
    for port in random.sample(_RANGE, len(_RANGE)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port in {_RANGE}")
