"""Where this machine's data lie, and how its processes find the store."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from valuspec.errors import ValuSpecError

SOCKET_NAME = "valkey.sock"


class NoStoreError(ValuSpecError):
    """No store can be found; the message says how to name one."""


def cache_folder() -> Path:
    """VALUSPEC_CACHE, else `valuspec` in the user's cache folder; need not exist."""
    if chosen := os.environ.get("VALUSPEC_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "valuspec"


def valkey_folder() -> Path:
    """Data of the embedded Valkey, unless a deployment says otherwise."""
    return cache_folder() / "valkey"


def store_url(given: str | None = None) -> str:
    """URL of the store for jobs and commands: `given`, else VALUSPEC_JOBS_REDIS_URL (a user who
    may publish), else REDIS_URL, which servers use, else that of the embedded Valkey, whose socket
    lies in its folder while it runs.

    Raises NoStoreError where none of them is there.
    """
    for url in (given, os.environ.get("VALUSPEC_JOBS_REDIS_URL"), os.environ.get("REDIS_URL")):
        if url:
            return url
    path = valkey_folder() / SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            raise NoStoreError(
                f"no store: REDIS_URL is not set, and no embedded Valkey answers at {path} "
                f"({error.strerror or error}). Start `valuspec serve`, or pass --redis-url "
                f"(redis://HOST:PORT/0, or unix://FOLDER/{SOCKET_NAME} for a server's valkey_dir)"
            ) from error
    return f"unix://{path}"
