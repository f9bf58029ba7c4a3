"""Serve a model on this machine: a local Ray, the Serve app, and a Valkey for draft trees.

Nothing listens beyond this machine unless --host says so, and then only with API keys, which come
from VALUSPEC_API_KEYS ("tenant:key" or "key", comma separated) or the file named by
VALUSPEC_API_KEYS_FILE (one a line). With REDIS_URL set, draft trees are kept there in place of a
Valkey of our own.

Ctrl-C or SIGTERM lets running answers end and refuses new requests; the second one stops at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.auth import ApiKeys
from deployments.exposure import ExposedError, check_exposure
from deployments.preflight import check_port, check_ranks, check_store
from deployments.settings import AppArgs
from retrieval.locations import cache_folder
from valuspec.errors import ModelError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ApplicationStatusOverview

EXAMPLE = """example:
  valuspec serve
  valuspec serve --model ./my-model --port 9000 --max-batch-size 16"""

_APP_NAME = "valuspec"
#: For a gateway's answer, and beyond the timeout, which it keeps to itself.
_PATIENCE_S = 10.0
_PROXY_S = 1.0

#: How Ray carries a stream: little more than half the CPU of its defaults, which on one machine
#: is the model's. On a cluster it is the operator's choice (docs/operations.md).
SERVE_ENVIRONMENT = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray would have its workers give way (by 15) to all else on the machine.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.refusals:middlewares",
    # A replica that no longer answers cannot be asked to go.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = AppArgs()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    parser.add_argument(
        "--model",
        default=defaults.model,
        help="'smollm2' (built in), a local folder, a .gguf file or a hub id (%(default)s)",
    )
    parser.add_argument("--served-model-name", help="model id that clients send")
    parser.add_argument("--dtype", default=defaults.dtype, help="(%(default)s)")
    parser.add_argument("--device", default=defaults.device, help="cpu or cuda (%(default)s)")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=defaults.tensor_parallel_size,
        metavar="N",
        help="split the model among N GPUs, or N processes on a CPU (%(default)s)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=defaults.max_batch_size,
        help="requests decoded together (%(default)s)",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=defaults.max_waiting,
        help="requests queued beyond those before the answer is 429 (%(default)s)",
    )
    parser.add_argument(
        "--stream-interval",
        type=float,
        metavar="SECONDS",
        default=defaults.stream_interval_s,
        help="between events of a stream, but for the first and the last; 0: as they come"
        " (%(default)s)",
    )
    parser.add_argument(
        "--kv-cache-tokens",
        type=int,
        help="tokens of context kept in memory (as many as 40 %% of it hold)",
    )
    parser.add_argument("--num-threads", type=int, help="CPU threads of the model (all cores)")
    parser.add_argument(
        "--draft",
        choices=("retrieval", "eagle3", "hybrid"),
        default=defaults.draft,
        help="what proposes: text that occurred before, a draft head, or both (%(default)s)",
    )
    parser.add_argument(
        "--draft-head", metavar="FOLDER", help="EAGLE-3 head of the model (the one of smollm2)"
    )
    parser.add_argument("--threshold-file", help="threshold set to use, whatever is published")
    parser.add_argument(
        "--log",
        nargs="?",
        const=cache_folder() / "log",
        type=Path,
        metavar="FOLDER",
        help="log token ids of greedy requests there (%(const)s), for `python -m jobs.recalibrate` "
        "and `valuspec replay`; without it nothing is logged",
    )
    parser.add_argument(
        "--log-opt-out", nargs="+", default=[], metavar="TENANT", help="never log these tenants"
    )
    parser.add_argument(
        "--fast", action="store_true", help="give up bit-identical output where that is faster"
    )
    parser.add_argument(
        "--no-retrieval", action="store_true", help="do not store or look up draft trees"
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running answers may take to end after Ctrl-C or SIGTERM (%(default)g)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine although API keys or Ray's token are missing",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code."""
    # pydantic names the option and the limit; a traceback would only hide them.
    try:
        args = AppArgs(
            model=options.model,
            served_model_name=options.served_model_name,
            dtype=options.dtype,
            device=options.device,
            tensor_parallel_size=options.tensor_parallel_size,
            exact=not options.fast,
            max_batch_size=options.max_batch_size,
            max_waiting=options.max_waiting,
            stream_interval_s=options.stream_interval,
            kv_cache_tokens=options.kv_cache_tokens,
            num_threads=options.num_threads,
            draft=options.draft,
            # Replicas run in folders of their own.
            draft_head=options.draft_head and str(Path(options.draft_head).absolute()),
            threshold_file=options.threshold_file,
            retrieval=not options.no_retrieval,
            log_dir=None if options.log is None else str(options.log.absolute()),
            log_opt_out=tuple(options.log_opt_out),
            insecure=options.insecure,
        )
        keys = ApiKeys.from_environment()
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # inherited by all processes of Ray
        if not options.drain_timeout >= 0:  # nor NaN
            raise ValueError(f"--drain-timeout {options.drain_timeout} is not a number of seconds")
        check_exposure(options.host, keys, insecure=options.insecure)
        check_port(options.host, options.port)
        check_ranks(args)
        if args.retrieval and (url := os.environ.get("REDIS_URL")):
            asyncio.run(check_store(url))
    except (ValueError, OSError, ExposedError, ModelError) as error:
        print(f"valuspec serve: {error}", file=sys.stderr)
        return 2
    try:
        return _serve(args, options.host, options.port, drain_timeout_s=options.drain_timeout)
    except KeyboardInterrupt:
        return 0


def _serve(args: AppArgs, host: str, port: int, *, drain_timeout_s: float) -> int:
    """Start everything, wait for a signal, stop everything; at once if that raises
    KeyboardInterrupt."""
    # Read by Ray when it is imported, and inherited by all of its processes.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Despite its name, this is what keeps Ray's own ports on the loopback address.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    for name, value in SERVE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    print("==> starting Ray on this machine", flush=True)
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from deployments.app import build_app

    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        # After ray.init, which installs handlers of its own. Both signals end like Ctrl-C.
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.default_int_handler)
        print(f"==> loading {args.model_name} (up to a minute; longer the first time)", flush=True)
        serve.start(http_options={"host": host, "port": port})
        try:
            app = serve.run(build_app(args), name=_APP_NAME)
        except (RuntimeError, RayServeException) as error:
            print(f"valuspec serve: the app did not start: {error}", file=sys.stderr)
            if (failed := serve.status().applications.get(_APP_NAME)) is not None:
                for reason in _reasons(failed):
                    print(f"valuspec serve: {reason}", file=sys.stderr)
            return 1
        print(_greeting(args, host, port), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        asyncio.run(_stop(app, drain_timeout_s))
        return 0
    finally:
        # A further signal must not leave half of the processes behind.
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.SIG_IGN)
        print("==> stopping", flush=True)
        ray.shutdown()


async def _stop(app: DeploymentHandle[Any], timeout_s: float) -> None:
    """Refuse new requests, wait for open ones to end, which the gateways see to, and end the app.

    In an event loop, as Serve's handles may be told to run in none but the caller's.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    print(f"\n==> letting answers end, {timeout_s:g} s at most (Ctrl-C stops at once)", flush=True)
    give_up_at = time.monotonic() + timeout_s + _PATIENCE_S
    try:
        # Asked again and again, the gateways need not be waited for when a second signal comes.
        while sum(await app.broadcast("drain", timeout_s).results_async(timeout_s=_PATIENCE_S)):
            if time.monotonic() > give_up_at:
                raise TimeoutError("requests are open beyond the timeout")
            await asyncio.sleep(0.2)
    except (TimeoutError, RayError, RayServeException) as error:
        print(f"valuspec serve: not drained: {error}", file=sys.stderr)
    # What the gateways have sent is still to be passed on by the proxies, which stop first.
    await asyncio.sleep(_PROXY_S)
    await serve.shutdown_async()  # type: ignore[no-untyped-call]


def _reasons(app: ApplicationStatusOverview) -> Iterator[str]:
    """What each deployment that did not start failed of, without the way there."""
    for name, deployment in app.deployments.items():
        lines = deployment.message.strip().splitlines()
        if lines and deployment.status.value != "HEALTHY":
            yield f"{name}: {lines[-1].strip()}"


def _greeting(args: AppArgs, host: str, port: int) -> str:
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    return f"""==> serving {args.model_name} on {url} (Ctrl-C stops)

curl {url}/v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{args.model_name}", "temperature": 0,
       "messages": [{{"role": "user", "content": "What is a draft tree?"}}]}}'
"""
