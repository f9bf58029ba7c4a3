"""List the tenants that have draft trees, and drop one of them completely.

Works on the store itself: REDIS_URL, or the Valkey of a `valuspec serve` on this machine. `drop`
deletes trees, corpora and rows of trajectory logs, of every model and with every cache_salt. First
revoke the tenant's keys, or more is stored meanwhile. What replicas hold in memory goes when they
are restarted.

exit codes: 0 done; 1 something could not be searched or deleted; 2 wrong arguments or no store
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

EXAMPLE = """example:
  valuspec tenants list
  valuspec tenants drop acme --log /shared/log"""

_PATIENCE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--redis-url", help="the store (REDIS_URL, else this machine's Valkey)")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    actions.add_parser("list", parents=[common], help="tenants, models, trees and corpora")
    drop = actions.add_parser("drop", parents=[common], help="delete all that is stored of one")
    drop.add_argument("tenant", help="its name in VALUSPEC_API_KEYS; 'default' without keys")
    drop.add_argument(
        "--log", type=Path, nargs="+", metavar="FOLDER", help="folders of trajectory logs"
    )
    drop.set_defaults(fingerprints=[], corpus=None, id=None)


def run(options: argparse.Namespace) -> int:
    from retrieval.locations import NoStoreError, store_url
    from retrieval.store import StoreError

    if options.action == "drop":
        from jobs.commands import forget

        return forget.run(options)
    try:
        asyncio.run(_list(store_url(options.redis_url)))
    except NoStoreError as error:
        return _fail(error, 2)
    except StoreError as error:
        return _fail(error, 1)
    return 0


async def _list(url: str) -> None:
    from retrieval.redis_documents import RedisDocuments
    from retrieval.redis_store import RedisStore
    from retrieval.tenants import TenantRegistry

    trees = RedisStore(url, connect_timeout_s=_PATIENCE_S, read_timeout_s=_PATIENCE_S)
    documents = RedisDocuments(url, read_timeout_s=_PATIENCE_S)
    try:
        tenants = TenantRegistry(documents)
        print(f"{'tenant':<24}{'model':<26}{'trees':>9}  corpora")
        for owner in await tenants.owners():
            count = await trees.count(owner.namespace)
            corpora = ", ".join(await tenants.corpora(owner.namespace))
            print(f"{owner.tenant:<24}{owner.model_fingerprint:<26}{count:>9}  {corpora}")
    finally:
        await trees.aclose()
        await documents.aclose()


def _fail(error: Exception, code: int) -> int:
    print(f"valuspec tenants: {error}", file=sys.stderr)
    return code
