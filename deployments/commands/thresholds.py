"""Look at published threshold sets and choose the one that replicas use.

Works on the store itself: REDIS_URL, or the Valkey of a `valuspec serve` on this machine. Replicas
follow within seconds, without a restart; running requests keep the set they began with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from retrieval.locations import NoStoreError, store_url
from retrieval.store import StoreError
from retrieval.threshold_store import Pointer, PublishRefusedError, ThresholdStore
from valuspec.errors import ThresholdError, ValuSpecError
from valuspec.thresholds import ThresholdSet

EXAMPLE = """example:
  valuspec thresholds show
  valuspec thresholds list
  valuspec thresholds activate 5f0c --reason "back to Monday's"
  valuspec thresholds rollback
  valuspec thresholds import set.json --activate

exit codes: 0 done, 1 refused or failed, 2 wrong arguments or no store"""


class UsageError(ValuSpecError):
    """What was asked for is ambiguous or does not exist."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--redis-url", help="the store (REDIS_URL, else this machine's Valkey)")
    common.add_argument("--model", help="model fingerprint (the only one in the store)")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")

    show = actions.add_parser("show", parents=[common], help="what is in use and what was before")
    show.add_argument("--url", help="ask this server instead: also shows what each replica uses")
    show.add_argument(
        "--api-key",
        default=os.environ.get("VALUSPEC_API_KEY"),
        help="key of the server (VALUSPEC_API_KEY)",
    )
    actions.add_parser("list", parents=[common], help="every set kept for the model")
    activate = actions.add_parser("activate", parents=[common], help="let replicas use a set")
    activate.add_argument("version", help="version, or the beginning of one")
    rollback = actions.add_parser("rollback", parents=[common], help="go back to the set before")
    for action in (activate, rollback):
        action.add_argument("--reason", default="by hand", help="kept in the history (%(default)s)")
    export = actions.add_parser("export", parents=[common], help="write a set to a file")
    export.add_argument("version", help="version, or the beginning of one")
    export.add_argument("file", type=Path)
    load = actions.add_parser("import", parents=[common], help="keep a set from a file")
    load.add_argument("file", type=Path)
    load.add_argument("--activate", action="store_true", help="and let replicas use it")
    load.add_argument("--reason", default="imported", help="kept in the history (%(default)s)")


def run(options: argparse.Namespace) -> int:
    try:
        if options.action == "show" and options.url:
            return _show_server(options.url, options.api_key)
        return asyncio.run(_with_store(options, _ACTIONS[options.action]))
    except (NoStoreError, UsageError) as error:
        return _fail(error, 2)
    except (PublishRefusedError, StoreError, ThresholdError, OSError, httpx.HTTPError) as error:
        return _fail(error, 1)


async def _with_store(
    options: argparse.Namespace,
    action: Callable[[ThresholdStore, argparse.Namespace], Awaitable[None]],
) -> int:
    store = ThresholdStore.at(store_url(options.redis_url))
    try:
        await action(store, options)
    finally:
        await store.aclose()
    return 0


async def _show(store: ThresholdStore, options: argparse.Namespace) -> None:
    model = await _model(store, options.model)
    pointer = await store.pointer(model)
    print(f"model      {model}")
    if pointer is None:
        print("active     nothing was activated yet: replicas use the shipped set")
        return
    print(f"active     {pointer.version}, revision {pointer.revision}: {pointer.reason}")
    print(f"previous   {pointer.previous or 'none'}")
    thresholds = await _load(store, pointer.version)
    for bucket in thresholds.buckets:
        print(
            f"threshold  {bucket.tau:.4f} for batches up to {bucket.max_batch_size}, "
            f"{bucket.stream_tok_s:.1f} tok/s a stream"
        )
    for name, value in thresholds.provenance.items():
        print(f"{name}: {json.dumps(value)}")
    print("history:")
    for activation in reversed(pointer.history):
        print(f"  {activation.revision:>4}  {activation.version}  {activation.reason}")


async def _list(store: ThresholdStore, options: argparse.Namespace) -> None:
    model = await _model(store, options.model)
    pointer = await store.pointer(model)
    marks = {} if pointer is None else {pointer.previous: "previous", pointer.version: "active"}
    for version in await store.versions(model):
        text = await store.get(version)
        try:
            made_by = ThresholdSet.from_json(text or "").provenance.get("made_by", "")
        except ThresholdError as error:
            made_by = f"unusable: {error}"
        print(f"{version}  {marks.get(version, ''):<8}  {made_by}")


async def _activate(store: ThresholdStore, options: argparse.Namespace) -> None:
    model = await _model(store, options.model)
    version = await _version(store, model, options.version)
    await _point_to(store, await _load(store, version), options.reason)


async def _rollback(store: ThresholdStore, options: argparse.Namespace) -> None:
    model = await _model(store, options.model)
    pointer = await store.pointer(model)
    revision = pointer.revision if pointer else 0
    _moved(await store.rollback(model, expected_revision=revision, reason=options.reason))


async def _export(store: ThresholdStore, options: argparse.Namespace) -> None:
    model = await _model(store, options.model)
    thresholds = await _load(store, await _version(store, model, options.version))
    options.file.write_text(thresholds.to_json() + "\n")
    print(f"{thresholds.version} -> {options.file}")


async def _import(store: ThresholdStore, options: argparse.Namespace) -> None:
    thresholds = ThresholdSet.load(options.file)
    model = thresholds.model_fingerprint
    if options.model not in (None, model):
        raise UsageError(f"{options.file} is of model {model}, not {options.model}")
    created = await store.put(model, thresholds.version, thresholds.to_json())
    print(f"{thresholds.version} {'kept' if created else 'was kept already'}, model {model}")
    if options.activate:
        await _point_to(store, thresholds, options.reason)


_ACTIONS = {
    "show": _show,
    "list": _list,
    "activate": _activate,
    "rollback": _rollback,
    "export": _export,
    "import": _import,
}


async def _model(store: ThresholdStore, given: str | None) -> str:
    models = await store.models()
    if given is None and len(models) == 1:
        return models[0]
    if given in models:
        return given
    known = f"sets are kept for {', '.join(models)}" if models else "no set is kept for any model"
    raise UsageError(f"{f'model {given}' if given else 'which model? --model'}: {known}")


async def _version(store: ThresholdStore, model: str, given: str) -> str:
    matching = [v for v in await store.versions(model) if v.startswith(given)]
    if len(matching) != 1:
        raise UsageError(f"{given} fits {', '.join(matching) or 'no set kept for the model'}")
    return matching[0]


async def _load(store: ThresholdStore, version: str) -> ThresholdSet:
    """A set this build can use; replicas would refuse another one."""
    text = await store.get(version)
    if text is None:
        raise ThresholdError(f"{version} is gone from the store")
    return ThresholdSet.from_json(text)


async def _point_to(store: ThresholdStore, thresholds: ThresholdSet, reason: str) -> None:
    model = thresholds.model_fingerprint
    try:
        pointer = await store.pointer(model)
    except StoreError as error:
        if error.kind != "protocol":
            raise
        print(f"mending the pointer: {error}", file=sys.stderr)
        pointer = None
    _moved(
        await store.activate(
            model,
            thresholds.version,
            expected_revision=pointer.revision if pointer else 0,
            reason=reason,
        )
    )


def _moved(pointer: Pointer) -> None:
    print(f"active is {pointer.version}, revision {pointer.revision}; replicas follow in seconds")


def _show_server(url: str, api_key: str | None) -> int:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    response = httpx.get(f"{url}/v1/valuspec/thresholds", headers=headers, timeout=30)
    response.raise_for_status()
    print(json.dumps(response.json(), indent=2))
    return 0


def _fail(error: Exception, code: int) -> int:
    print(f"valuspec thresholds: {error}", file=sys.stderr)
    return code
