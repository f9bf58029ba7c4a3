"""Store answers that were given before, so that the first requests find drafts.

Takes JSON lines of prompts and answers, as token ids or, with --tokenizer, as text (see
`jobs/transcripts.py`), or a data set of the Hugging Face hub by its name (its .jsonl files). They
become draft trees of one tenant and one model, under a corpus name by which they can be deleted
again (`valuspec forget TENANT --corpus NAME`). Running servers find them within seconds. An
interrupted run goes on where it stopped; lines that were read before are not read again.

exit codes: 0 all lines stored; 1 some were skipped, or the store failed; 2 wrong arguments
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.ingest import Ingested
    from retrieval.tenants import Owner, TenantRegistry

EXAMPLE = """example:
  valuspec ingest answers.jsonl --tokenizer smollm2
  valuspec ingest answers.jsonl --tenant acme --corpus support-2026
  valuspec ingest owner/name --tokenizer smollm2"""

_PATIENCE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILE", help="JSON lines, or a data set's name")
    parser.add_argument("--tenant", default="default", help="whose trees (%(default)s)")
    parser.add_argument("--corpus", help="name to delete them by (the name of the file)")
    parser.add_argument(
        "--fingerprints",
        nargs=2,
        metavar=("MODEL", "TOKENIZER"),
        help="of the model that gave the answers, as GET /v1/valuspec/stats shows them (the only "
        "one the store knows)",
    )
    parser.add_argument(
        "--tokenizer", help="for text: a folder, a hub id, a .gguf file or 'smollm2'"
    )
    parser.add_argument("--redis-url", help="the store (REDIS_URL, else this machine's server)")
    parser.add_argument(
        "--again", action="store_true", help="from the first line, whatever was read before"
    )


def run(options: argparse.Namespace) -> int:
    """Store, report progress on stderr, and return the exit code."""
    from jobs.hub import dataset_files
    from retrieval.locations import store_url
    from retrieval.store import StoreError
    from valuspec.errors import ValuSpecError

    try:
        files = dataset_files(options.source)
        done = asyncio.run(_ingest(files, options, store_url(options.redis_url)))
    except StoreError as error:
        return _fail(f"the store failed, and the next run goes on from there: {error}", 1)
    except (ValuSpecError, OSError) as error:
        return _fail(str(error), 2)
    num_skipped = sum(sum(one.skipped.values()) for one in done)
    print(f"{sum(one.num_answers for one in done)} answers stored, {num_skipped} lines skipped")
    for path, one in zip(files, done, strict=True):
        for line, reason in one.named:
            print(f"{path.name}:{line}: {reason}", file=sys.stderr)
        unnamed = sum(one.skipped.values()) - len(one.named)
        if unnamed > 0:
            print(f"{path.name}: and {unnamed} more, {dict(one.skipped)}", file=sys.stderr)
    return 1 if num_skipped else 0


async def _ingest(files: list[Path], options: argparse.Namespace, url: str) -> list[Ingested]:
    from jobs.ingest import Progress, ingest
    from retrieval.locations import cache_folder
    from retrieval.redis_documents import RedisDocuments
    from retrieval.redis_store import RedisStore
    from retrieval.tenants import TenantRegistry

    tokenizer = None
    if options.tokenizer:
        from valuspec.engine.weights import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    trees = RedisStore(url, connect_timeout_s=_PATIENCE_S, read_timeout_s=_PATIENCE_S)
    documents = RedisDocuments(url, read_timeout_s=_PATIENCE_S)
    try:
        tenants = TenantRegistry(documents)
        owner = await _owner(options, tenants)
        done = []
        for path in files:
            corpus = options.corpus or Path(options.source).name
            progress = Progress(cache_folder() / "ingest", path, owner, corpus)
            if options.again:
                progress.forget()
            one = await ingest(
                path,
                owner,
                corpus,
                trees=trees,
                tenants=tenants,
                tokenizer=tokenizer,
                progress=progress,
                report=_Reporter(path),
            )
            done.append(one)
        return done
    finally:
        await trees.aclose()
        await documents.aclose()


async def _owner(options: argparse.Namespace, tenants: TenantRegistry) -> Owner:
    """The tenant with the model given, else the one model the store knows."""
    from retrieval.tenants import Owner
    from valuspec.errors import ValuSpecError

    if options.fingerprints:
        return Owner(options.tenant, *options.fingerprints)
    known = {(o.model_fingerprint, o.tokenizer_fingerprint) for o in await tenants.owners()}
    if len(known) != 1:
        raise ValuSpecError(
            f"which model gave the answers? The store knows {len(known)}; pass --fingerprints "
            "MODEL TOKENIZER, as GET /v1/valuspec/stats shows them"
        )
    return Owner(options.tenant, *known.pop())


class _Reporter:
    """A line of progress a second, without control characters: it may go to a log."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._size = max(path.stat().st_size, 1)
        self._started = self._next = time.monotonic()

    def __call__(self, done: Ingested) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1
            rate = done.num_answers / max(now - self._started, 1e-9)
            print(
                f"{self._name}: {done.offset / self._size:.0%}, {done.num_answers} answers, "
                f"{rate:.0f} a second",
                file=sys.stderr,
            )


def _fail(message: str, code: int) -> int:
    print(f"valuspec ingest: {message}", file=sys.stderr)
    return code
