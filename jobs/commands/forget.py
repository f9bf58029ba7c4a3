"""Delete what is stored of one tenant: draft trees, corpora, rows of trajectory logs.

First stop the tenant's traffic (revoke its keys) or at least its logging (log_opt_out), or more
is stored behind this command's back. Trees are named by tenant, model and tokenizer: the models
are those the store knows of, those found in the logs, and those given with --fingerprints, as GET
/v1/valuspec/stats shows them. With --corpus or --id only those trees go. What replicas hold in
memory goes when they are restarted.

exit codes: 0 nothing of the tenant is left there; 1 something could not be searched or deleted
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from retrieval.locations import cache_folder

if TYPE_CHECKING:
    from retrieval.tenants import Owner

EXAMPLE = """example:
  valuspec forget acme
  valuspec forget acme --log /shared/log --redis-url redis://10.0.0.5:6379/0
  valuspec forget acme --corpus support-2026"""

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
        help="a model whose trees to delete, besides those that are known; may be repeated",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--corpus", help="only the trees that were ingested under this name")
    part.add_argument("--id", type=int, nargs="+", help="only the trees of these ids")


def run(options: argparse.Namespace) -> int:
    """Delete, say what was deleted, and return the exit code."""
    from retrieval.locations import NoStoreError, store_url
    from retrieval.store import StoreError
    from retrieval.tenants import Owner
    from retrieval.trajectory_log import delete_namespace, read_log

    usual = cache_folder() / "log"
    folders: list[Path] = options.log or ([usual] if usual.is_dir() else [])
    models = {
        (row.model_fingerprint, row.tokenizer_fingerprint) for row in read_log(folders).trajectories
    }
    models |= {(model, tokenizer) for model, tokenizer in options.fingerprints}
    owners = {Owner(options.tenant, *model) for model in models}
    failures: set[str] = set()
    try:
        # Trees first: a run that ends in between finds the models in the logs again.
        num_trees, found = asyncio.run(_forget(store_url(options.redis_url), options, owners))
        owners |= set(found)
        print(f"{num_trees} draft trees deleted, models searched: {len(owners)}")
    except (NoStoreError, StoreError) as error:
        failures.add(f"draft trees: {error}")
    if not owners:
        failures.add("neither the store nor the logs name a model; give --fingerprints")
    if options.corpus is None and options.id is None:
        num_rows = 0
        for folder in folders:
            for name in sorted(owner.namespace for owner in owners):
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


async def _forget(
    url: str, options: argparse.Namespace, owners: set[Owner]
) -> tuple[int, list[Owner]]:
    """Delete of these owners, and those of the tenant that the store knows: how many trees, and
    of whom."""
    from retrieval.redis_documents import RedisDocuments
    from retrieval.redis_store import RedisStore
    from retrieval.tenants import TenantRegistry

    trees = RedisStore(url, connect_timeout_s=_PATIENCE_S, read_timeout_s=_PATIENCE_S)
    documents = RedisDocuments(url, read_timeout_s=_PATIENCE_S)
    try:
        tenants = TenantRegistry(documents)
        everyone = sorted(owners | set(await tenants.owners(options.tenant)))
        num_trees = 0
        for owner in everyone:
            if options.corpus is not None:
                num_trees += await tenants.drop_corpus(trees, owner.namespace, options.corpus)
            elif options.id is not None:
                num_trees += sum(await trees.listed(owner.namespace, options.id))
                await trees.drop(owner.namespace, options.id)
            else:
                num_trees += await tenants.drop(trees, owner)
        return num_trees, everyone
    finally:
        await trees.aclose()
        await documents.aclose()
