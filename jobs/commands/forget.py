"""Delete what is stored of one tenant: rows of trajectory logs, and draft trees.

First stop the tenant's traffic (revoke its keys) or at least its logging (log_opt_out), or more
is stored behind this command's back. Trees are named by tenant, model and tokenizer: the models
are those found in the logs and those given with --fingerprints, as GET /v1/valuspec/stats shows
them. What replicas hold in memory goes when they are restarted.

exit codes: 0 nothing of the tenant is left there; 1 something could not be searched or deleted
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

from retrieval.locations import cache_folder

EXAMPLE = """example:
  valuspec forget acme
  valuspec forget acme --log /shared/log --redis-url redis://10.0.0.5:6379/0"""

#: Nobody waits for a deletion as for an answer.
_PATIENCE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", help="its name in VALUSPEC_API_KEYS; 'default' without keys")
    parser.add_argument(
        "--log",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="folders of trajectory logs (that of this machine's server, if it has one)",
    )
    parser.add_argument(
        "--redis-url", help="where draft trees are kept (REDIS_URL, else this machine's server)"
    )
    parser.add_argument(
        "--fingerprints",
        nargs=2,
        action="append",
        default=[],
        metavar=("MODEL", "TOKENIZER"),
        help="a model whose trees to delete, besides those in the logs; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Delete, say what was deleted, and return the exit code."""
    from retrieval.locations import NoStoreError, store_url
    from retrieval.namespace import namespace
    from retrieval.store import StoreError
    from retrieval.trajectory_log import delete_namespace, read_log

    usual = cache_folder() / "log"
    folders: list[Path] = options.log or ([usual] if usual.is_dir() else [])
    models = {
        (row.model_fingerprint, row.tokenizer_fingerprint) for row in read_log(folders).trajectories
    }
    models |= {(model, tokenizer) for model, tokenizer in options.fingerprints}
    namespaces = [namespace(options.tenant, *model) for model in sorted(models)]
    failures = set() if models else {"the logs name no model; give --fingerprints"}
    try:
        # Trees first: a run that ends in between finds the models in the logs again.
        num_trees = asyncio.run(_forget_trees(store_url(options.redis_url), namespaces))
        print(f"{num_trees} draft trees deleted, models searched: {len(models)}")
    except (NoStoreError, StoreError) as error:
        failures.add(f"draft trees: {error}")
    num_rows = 0
    for folder in folders:
        for name in namespaces:
            try:
                done = delete_namespace(folder, name)
            except OSError as error:
                failures.add(f"{folder}: {error}")
                continue
            num_rows += done.num_rows
            failures |= {f"{path}: could not be searched" for path in done.unsearched}
    print(f"{num_rows} log rows deleted, folders searched: {len(folders)}")
    for failure in sorted(failures):
        print(f"valuspec forget: {failure}", file=sys.stderr)
    return 1 if failures else 0


async def _forget_trees(url: str, namespaces: Iterable[str]) -> int:
    from retrieval.forgetting import forget_trees
    from retrieval.redis_store import RedisStore

    store = RedisStore(url, connect_timeout_s=_PATIENCE_S, read_timeout_s=_PATIENCE_S)
    try:
        return sum([await forget_trees(store, name) for name in namespaces])
    finally:
        await store.aclose()
