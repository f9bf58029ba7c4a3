"""Every error body has OpenAI's shape, and every answer carries a request id.

{"error": {"message": …, "type": …, "param": …, "code": …}}

Unexpected exceptions are logged with the request id; the client sees neither their text nor a
traceback.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.messages import Refusal
from valuspec.errors import RequestError

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
#: On a refusal that holds for whoever asks next, too (`deployments.refusals`).
FULL_HEADER = b"x-valuspec-full"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ApiError(Exception):
    """An HTTP status with the fields of an OpenAI error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.full = False
        """Whether there is no room for any other call either, for a moment."""

    @classmethod
    def of(cls, refusal: Refusal) -> ApiError:
        return cls(
            refusal.status,
            refusal.message,
            param=refusal.param,
            code=refusal.code,
            retry_after_s=refusal.retry_after_s,
        )

    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.full:
            headers[FULL_HEADER.decode()] = "1"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers=headers)


def busy() -> ApiError:
    return ApiError(
        429, "The server is at capacity; try again.", code="overloaded", retry_after_s=1
    )


def request_id_of(scope: Scope) -> str:
    """The one the client sent, if it is one, else a new one."""
    sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


#: What is wrong with the Host among a request's headers, if anything.
CheckHost = Callable[[Iterable[tuple[bytes, bytes]]], ApiError | None]


class RequestContext:
    """ASGI middleware: request id in and out, a sane Host, a cap on the body, and no exception past
    this point."""

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, echo_request_id: bool, check_host: CheckHost
    ) -> None:
        self._app = app
        self._check_host = check_host
        self._echo_request_id = echo_request_id
        self._max_body_bytes = max_body_bytes
        self._too_large = f"The request body is larger than {max_body_bytes} bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = request_id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._echo_request_id:
                    header = (b"x-request-id", request_id.encode())
                    message["headers"] = [*message["headers"], header]
            await send(message)

        num_bytes = 0

        async def receive_capped() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large)  # the one type FastAPI lets through
            return message

        if (wrong := self._check_host(scope["headers"])) is not None:
            await wrong.response()(scope, receive, send_with_id)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body_bytes:
            await ApiError(413, self._too_large).response()(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive_capped, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if started:
                raise
            error = ApiError(500, f"Internal error. Quote request id {request_id} to the operator.")
            await error.response()(scope, receive, send_with_id)


def install(
    app: FastAPI, *, max_body_bytes: int, echo_request_id: bool, check_host: CheckHost
) -> None:
    """Give `app` the middleware and the handlers that shape every error."""
    app.add_middleware(
        RequestContext,
        max_body_bytes=max_body_bytes,
        echo_request_id=echo_request_id,
        check_host=check_host,
    )
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_request_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return ApiError(400, str(error), param=error.param, code=error.code).response()


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    """Report the first violation; OpenAI's error names one parameter."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):  # raised by a validator of ours
        return ApiError(400, str(cause), param=cause.param, code=cause.code).response()
    if first["type"] == "json_invalid":
        return ApiError(400, "The request body is not valid JSON.", code="invalid_json").response()
    # loc is ("body", field, index or union member, …)
    param = str(first["loc"][1]) if len(first["loc"]) > 1 else None
    message = f"{param}: {first['msg']}" if param else f"The request body: {first['msg']}"
    return ApiError(400, message, param=param).response()


async def _on_http_exception(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    response = ApiError(
        error.status_code, str(error.detail), code=codes.get(error.status_code)
    ).response()
    response.headers.update(error.headers or {})
    return response
