"""The HTTP face: routes, readiness, and streams straight from a replica.

`create_app` needs a `TargetPort` only, so every route runs in tests without Ray. No
`from __future__ import annotations`: FastAPI could not resolve the closures' `Tenant`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments import errors
from deployments.admission import HEALTH_PATH, Admission
from deployments.auth import ApiKeys
from deployments.errors import ApiError
from deployments.exposure import check_exposure, check_host
from deployments.failover import generate_through_losses
from deployments.inbox import ReplicaLostError
from deployments.messages import Delta, ModelCard, Refusal, Reply
from deployments.port import HandlePort, TargetPort
from deployments.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    FilterRequest,
    TokenizeRequest,
)
from deployments.settings import AppArgs
from deployments.sse import Answer, stream_events

logger = logging.getLogger(__name__)

#: A silent stream gets a comment this often, so that proxies keep the connection.
PING_INTERVAL_S = 15.0


def create_app(
    target: TargetPort,
    args: AppArgs,
    keys: ApiKeys,
    *,
    admission: Admission | None = None,
    echo_request_id: bool = True,
    local_only: bool = False,
) -> FastAPI:
    """The HTTP app. Once keys are configured, every route of it needs one; /health is none of its
    API routes. There is no /docs and no /openapi.json.

    admission:       to drain the app by
    echo_request_id: False behind a proxy that adds the x-request-id header to answers itself
    local_only:      refuse requests that know this machine by another name than its own
    """
    app = FastAPI(
        title="ValuSpec",
        dependencies=[Depends(keys.require)],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware((admission or Admission()).around)
    errors.install(
        app,
        max_body_bytes=args.max_body_bytes,
        echo_request_id=echo_request_id,
        check_host=partial(check_host, local_only=local_only),
    )

    async def health(_: Request) -> Response:
        await target.check_ready()
        return JSONResponse({"status": "ok"})

    app.router.add_route(HEALTH_PATH, health)
    _add_routes(app, target, args, keys)
    return app


def _add_routes(app: FastAPI, target: TargetPort, args: AppArgs, keys: ApiKeys) -> None:
    Tenant = Annotated[str, Depends(keys.require)]  # noqa: N806 - a type

    async def known_card(model: str | None) -> ModelCard:
        card = await target.card()
        if model is not None and model != card.name:
            raise ApiError(
                404,
                f"The model {model!r} does not exist; this server serves {card.name!r}.",
                param="model",
                code="model_not_found",
            )
        return card

    async def generate(
        body: CompletionRequest | ChatCompletionRequest,
        route: Literal["chat", "completions"],
        request: Request,
        tenant: str,
    ) -> Response:
        card = await known_card(body.model)
        request_id: str = request.state.request_id
        call = body.call(request_id, tenant, request.headers.get("x-session-id"))
        if call.num_choices > args.max_choices:
            raise ApiError(
                400,
                f"{call.num_choices} choices asked for (prompts times n); at most "
                f"{args.max_choices}.",
                param="n" if call.n > 1 else "prompt",
            )
        answer = Answer(
            route=route,
            request_id=request_id,
            model=card.name,
            n=call.n,
            num_choices=call.num_choices,
            return_token_ids=body.return_token_ids,
        )
        replies = generate_through_losses(target, call, timeout_s=args.request_timeout_s)
        try:
            first = await _first(replies, request_id)
        except ApiError as error:
            # With so much waiting, none of the model's places is empty while the refusal holds.
            queue_lasts = args.max_waiting >= args.max_batch_size
            error.full = error.status == 429 and call.num_choices == 1 and queue_lasts
            raise
        if body.stream:
            events = stream_events(answer, _deltas(first, replies), body)
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        async for delta in _deltas(first, replies):
            if delta is not None:
                answer.add(delta)
        return JSONResponse(answer.response())

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request, tenant: Tenant) -> Response:
        return await generate(body, "completions", request, tenant)

    @app.post("/v1/chat/completions")
    async def chat_completions(
        body: ChatCompletionRequest, request: Request, tenant: Tenant
    ) -> Response:
        return await generate(body, "chat", request, tenant)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(await target.card())]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        return _model_object(await known_card(model))

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("valuspec")}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        card = await target.card()
        messages = None if body.messages is None else tuple(m.plain() for m in body.messages)
        tokens = await target.encode(body.prompt, messages)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": card.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        return {"prompt": await target.decode(body.tokens)}

    @app.get("/v1/valuspec/stats")
    async def stats(tenant: Tenant) -> dict[str, Any]:
        """Counters of one replica since it started; Ray's metrics cover all of them.

        They are those of all tenants, whose doings must not show to each other.
        """
        keys.require_operator(tenant)
        return await target.stats()

    @app.get("/v1/valuspec/thresholds")
    async def thresholds(tenant: Tenant) -> dict[str, Any]:
        """The set one replica uses and why, what is published, and what the others use."""
        keys.require_operator(tenant)
        return await target.thresholds()

    @app.post("/v1/valuspec/filter")
    async def filter_tree(body: FilterRequest) -> dict[str, Any]:
        """Value a draft tree of any framework and say which nodes to verify."""
        return await target.filter(body)


async def _first(replies: AsyncGenerator[Reply], request_id: str) -> Delta:
    """Wait for the first output, so that what fails before it is a plain HTTP error."""
    try:
        match await anext(replies):
            case Refusal() as refusal:
                raise ApiError.of(refusal)
            case Delta(finish_reason="error"):
                raise ApiError(500, f"Generation failed. Request id: {request_id}")
            case delta:
                return delta
    except ReplicaLostError:
        raise ApiError(503, "The replica was lost; try again.", retry_after_s=1) from None
    except BaseException:
        await replies.aclose()
        raise


async def _deltas(first: Delta, rest: AsyncGenerator[Reply]) -> AsyncIterator[Delta | None]:
    """Yield `first` and the rest; None for each gap of PING_INTERVAL_S; close `rest` at the end.

    Raises ApiError when the replica fails in the middle.
    """
    # One task reads all of it: a wait for `rest` itself could not be given up without ending it.
    arrived: asyncio.Queue[Reply | Exception] = asyncio.Queue()
    reader = asyncio.create_task(_read(rest, arrived))
    try:
        yield first
        while True:
            try:
                async with asyncio.timeout(PING_INTERVAL_S):
                    reply = await arrived.get()
            except TimeoutError:
                yield None
                continue
            match reply:
                case Delta(finish_reason="error" | "cancelled"):
                    raise ApiError(500, "Generation failed in the middle of the answer.")
                case Delta():
                    yield reply
                case Refusal():
                    raise ApiError.of(reply)
                case StopAsyncIteration():
                    return
                case Exception():
                    raise reply
    except ReplicaLostError:
        raise ApiError(503, "The replica was lost; try again.", retry_after_s=1) from None
    except ApiError:
        raise
    except Exception as error:
        # A stream that has begun can no longer become a 500; it must still end as an error.
        logger.exception("an answer failed in the middle")
        raise ApiError(500, "Generation failed in the middle of the answer.") from error
    finally:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        await rest.aclose()


async def _read(replies: AsyncGenerator[Reply], arrived: asyncio.Queue[Reply | Exception]) -> None:
    """Put all replies into `arrived`, and at the end StopAsyncIteration or what went wrong."""
    try:
        async for reply in replies:
            arrived.put_nowait(reply)
        arrived.put_nowait(StopAsyncIteration())
    except Exception as error:  # noqa: BLE001 - raised where it is read
        arrived.put_nowait(error)


def _model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.loaded_at,
        "owned_by": "valuspec",
        "max_model_len": card.max_model_len,
        "dtype": card.dtype,
        "exact": card.exact,
        "exact_mode": card.exact_mode,
    }


def _listening_host() -> str | None:
    """Where Serve's proxies listen. None, any address, where Serve does not say."""
    client = _get_global_client()
    return client.http_config.host if client is not None else None


class Gateway:
    """The ingress deployment: `create_app` over the handles of the deployments behind it."""

    def __init__(
        self, args: AppArgs, target: DeploymentHandle[Any], valuation: DeploymentHandle[Any]
    ) -> None:
        self._args = args
        self._port = HandlePort(target, valuation)
        self._admission = Admission()
        # Read here, in the replica: keys must not travel through Serve's configuration.
        self._keys = ApiKeys.from_environment()
        check_exposure(_listening_host(), self._keys, insecure=args.insecure)

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's HTTP server adds the request id to every answer.
        return create_app(
            self._port,
            self._args,
            self._keys,
            admission=self._admission,
            echo_request_id=False,
            local_only=not self._keys and not self._args.insecure,
        )

    async def drain(self, timeout_s: float) -> int:
        """`Admission.drain`; for `DeploymentHandle.broadcast`, which reaches every gateway."""
        return self._admission.drain(timeout_s)
