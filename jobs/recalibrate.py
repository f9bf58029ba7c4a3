"""Learn thresholds from the trajectory log, and publish them if they are better than those in use.

    python -m jobs.recalibrate [--log DIR...] [--redis-url URL] [--dry-run | --force] [--out DIR]

Runs by itself or as a Ray job. The last line on stdout is JSON.

exit codes:
  0  published, or the set in use stays because nothing better was found
  1  a defect
  2  wrong arguments
  3  not enough data; nothing was published
  4  another run is at work
  5  overtaken: another run published meanwhile; nothing was published
  6  the store cannot be reached
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.recalibration import MARGIN, Settings, recalibrate
from jobs.report import Report
from jobs.workers import Workers, workers
from retrieval.locations import NoStoreError, cache_folder, store_url
from retrieval.threshold_store import ThresholdStore
from valuspec.errors import ThresholdError

EXIT_CODES = {
    "published": 0,
    "unchanged": 0,
    "kept": 0,
    "dry run": 0,
    "not enough data": 3,
    "busy": 4,
    "overtaken": 5,
    "store failed": 6,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and return its exit code."""
    options = _parser().parse_args(argv)
    settings = Settings(
        logs=options.log,
        out=options.out,
        model_fingerprint=options.model_fingerprint,
        cost_file=options.cost,
        num_trees=options.trees,
        margin=options.margin,
        force=options.force,
        dry_run=options.dry_run,
    )
    try:
        url = store_url(options.redis_url)
    except NoStoreError as error:
        if not options.dry_run:
            print(f"jobs.recalibrate: {error}", file=sys.stderr)
            return EXIT_CODES["store failed"]
        url = None
    try:
        with workers(options.workers) as pool:
            report = asyncio.run(_with_store(settings, url, pool))
    except (ThresholdError, OSError) as error:
        print(f"jobs.recalibrate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(report.verdict)
    for reason, count in report.skipped.items():
        print(f"left out: {count} x {reason}")
    summary: dict[str, Any] = {"outcome": report.outcome, "report": str(options.out)}
    if report.evaluation:
        summary["gain"] = report.evaluation.comparison.gain
    print(json.dumps(summary), flush=True)
    return EXIT_CODES[report.outcome]


async def _with_store(settings: Settings, url: str | None, pool: Workers) -> Report:
    if url is None:
        return await recalibrate(settings, None, pool)
    store = ThresholdStore.at(url)
    try:
        return await recalibrate(settings, store, pool)
    finally:
        await store.aclose()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jobs.recalibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--log",
        type=Path,
        nargs="+",
        default=[cache_folder() / "log"],
        help="trajectory logs: Parquet files, or folders of them (that of this machine's server)",
    )
    parser.add_argument(
        "--redis-url",
        help="where thresholds are published (REDIS_URL, or this machine's embedded Valkey)",
    )
    parser.add_argument("--model-fingerprint", help="of the model to calibrate (the newest logged)")
    parser.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="written by `valuspec cost` (what the replicas measured)",
    )
    parser.add_argument(
        "--trees", type=int, default=16, help="draft trees retrieved per request (%(default)s)"
    )
    parser.add_argument(
        "--margin", type=float, default=MARGIN, help="least gain worth a new set (%(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, help="Ray workers (in a Ray job the cluster's CPUs, else none)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=cache_folder() / "recalibration",
        help="folder of report.html and report.json (%(default)s)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="publish nothing")
    what.add_argument("--force", action="store_true", help="publish whatever the gain")
    return parser


if __name__ == "__main__":
    sys.exit(main())
