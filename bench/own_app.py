"""An app of one's own to measure, with an empty store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx

from retrieval.embedded import EmbeddedValkey
from valuspec.errors import ValuSpecError

#: A first start compiles kernels.
START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def own_app(*options: str) -> Iterator[str]:
    """`valuspec serve` with these options, on a free port of this machine; yields its URL.

    Its Valkey is new and gone afterwards, so nothing that was answered before is met again.
    Raises ValuSpecError when the app does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port), *options]
    with EmbeddedValkey() as valkey:
        environment = os.environ | {"REDIS_URL": valkey.url}
        app = subprocess.Popen(command, env=environment, stdout=sys.stderr)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(app, url)
            yield url
        finally:
            app.send_signal(signal.SIGTERM)
            app.wait()


def _wait_until_ready(app: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if app.poll() is not None:
            raise ValuSpecError(f"the app ended with code {app.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise ValuSpecError(f"the app was not ready within {START_TIMEOUT_S:g} s")
