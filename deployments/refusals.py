"""A full server says so at its edge.

A request costs Serve's proxy, the gateway and what lies between them some 10 ms of CPU, a refused
one too. Where a model computes on the same cores, a flood of them would take half of it. So in the
proxy one refusal answers those that follow as well, for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import FULL_HEADER, busy, request_id_of
from deployments.telemetry import Telemetry

#: A place that gets free meanwhile is taken from the queue, which lasts longer.
HOLD_S = 0.1


class HeldRefusals:
    """ASGI middleware: after an answer with FULL_HEADER all POSTs to its path are refused for
    HOLD_S, before their keys and bodies are looked at."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._full_until: dict[str, float] = {}
        """By path."""
        self._telemetry = Telemetry()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if self._clock() < self._full_until.get(path, 0.0):
            self._telemetry.count("valuspec_refusals_repeated")
            refusal = busy().response()
            # Serve adds it further in.
            refusal.headers["x-request-id"] = request_id_of(scope)
            await refusal(scope, receive, send)
            return

        async def noting(message: Message) -> None:
            headers = message["headers"] if message["type"] == "http.response.start" else ()
            if any(name.lower() == FULL_HEADER for name, _ in headers):
                self._full_until[path] = self._clock() + HOLD_S
            await send(message)

        await self._app(scope, receive, noting)


def middlewares() -> list[Middleware]:
    """For Serve's RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(HeldRefusals)]
