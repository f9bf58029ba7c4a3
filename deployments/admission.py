"""Which HTTP requests a gateway takes, and how it comes to an end.

Where Serve's proxy refuses a request, it does so in plain text. So the gateway refuses first, in
OpenAI's form, and its options in `deployments.app` leave the proxy nothing to refuse.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError, busy
from deployments.sse import event

logger = logging.getLogger(__name__)

#: Of one gateway, beside /health. More than its target replicas run and queue: they refuse before.
MAX_OPEN_REQUESTS = 1024
#: What clients and load balancers are told to wait: other servers may answer at once, this one not
#: before it has been started again.
RETRY_AFTER_S = 10
HEALTH_PATH = "/health"


class Admission:
    """Counts open requests, refuses what is too much, and lets a gateway run empty.

    For one event loop.
    """

    def __init__(self, max_open_requests: int = MAX_OPEN_REQUESTS) -> None:
        self._max_open_requests = max_open_requests
        self._open: set[asyncio.Timeout] = set()
        self._draining = False

    def around(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware."""

        async def admit(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
            elif (refused := self._refusal(scope["path"])) is not None:
                await refused.response()(scope, receive, send)
            else:
                await self._run(app, scope, receive, send)

        return admit

    def drain(self, timeout_s: float) -> int:
        """Refuse whatever comes from now on; return how many requests are still open.

        One that has not ended timeout_s after the first call ends with an error, a stream with an
        error event. Later calls only count.
        """
        if not self._draining:
            self._draining = True
            deadline = asyncio.get_running_loop().time() + timeout_s
            for limit in self._open:
                limit.reschedule(deadline)
        return len(self._open)

    def _refusal(self, path: str) -> ApiError | None:
        if self._draining:
            return _stopping()
        # A full server is a healthy one.
        if len(self._open) >= self._max_open_requests and path != HEALTH_PATH:
            return busy()
        return None

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def noting(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._open.add(limit)
                await app(scope, receive, noting)
        except TimeoutError:
            if not limit.expired():
                raise
            logger.warning("%s did not end in time", scope["path"])
            if start is None:
                await _stopping().response()(scope, receive, send)
            elif _is_stream(start):
                await send({"type": "http.response.body", "body": event(_stopping().body())})
        finally:
            self._open.discard(limit)


def _stopping() -> ApiError:
    return ApiError(
        503, "The server is shutting down.", code="shutting_down", retry_after_s=RETRY_AFTER_S
    )


def _is_stream(start: Message) -> bool:
    headers = dict(start["headers"])
    return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))
