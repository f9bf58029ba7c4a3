"""Measure this project beside what people would pick instead.

    python -m bench.peers --data DIR [--workloads gsm8k ...] [--peers vllm-suffix ...] [--limit N]
                          [--out results.json] [--quick]

DIR holds WORKLOAD.SPLIT.jsonl with the splits history, calibration and test. What the file given
by --out has already is not measured again: an interrupted run goes on where it stopped. Peers'
environments are made when first needed. A run of all takes hours, --quick about ten minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import common
from bench.peers import workloads
from bench.peers.client import Workers
from bench.peers.environments import ROOT
from bench.peers.export import exported
from bench.peers.plan import WORKLOADS
from bench.peers.results import Results
from bench.peers.run import Run
from bench.peers.systems import SYSTEMS
from valuspec.engine.target import Target
from valuspec.engine.weights import BUNDLED_MODEL, _bundled_gguf

QUICK = {"workloads": ["gsm8k"], "limit": 4, "history": 32, "max_tokens": 64}


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    results = Results.open(args.out, _about(args))
    systems = [SYSTEMS[name] for name in args.peers]
    target = Target.load(args.model)
    stop_ids = sorted(target.eos_token_ids)
    found = [
        workloads.read(
            target, args.data, name,
            history=args.history, limit=args.limit, max_tokens=args.max_tokens,
        )
        for name in tqdm(args.workloads, desc="answers of earlier requests", file=sys.stderr)
    ]  # fmt: skip
    del target  # the workers want the memory
    metadata = _bundled_gguf() if args.model == BUNDLED_MODEL else None
    with Workers(exported(args.model, metadata), args.threads) as workers:
        run = Run(results, workers, systems, max_tokens=args.max_tokens, stop_ids=stop_ids)
        run.tune(found)
        run.measure(found)
    results.save()
    failures = results.data["failures"]
    common.print_json({"out": str(args.out), "failures": failures})
    return 1 if failures else 0


def _about(args: argparse.Namespace) -> dict[str, Any]:
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    settings = ("model", "limit", "history", "max_tokens", "threads")
    return {
        "revision": revision.stdout.strip() or "unknown",
        "environment": common.environment(),
        "cores": os.cpu_count(),
        "settings": {name: getattr(args, name) for name in settings},
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.peers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--data", type=Path, required=True, help="folder of requests")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME")
    parser.add_argument("--peers", nargs="+", choices=SYSTEMS, default=list(SYSTEMS),
                        metavar="NAME", help=", ".join(SYSTEMS))  # fmt: skip
    parser.add_argument("--limit", type=int, help="test requests of each workload (24)")
    parser.add_argument("--history", type=int, help="earlier requests, at most (400)")
    parser.add_argument("--max-tokens", type=int, help="of an answer (160)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="folder, hub id or smollm2")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--quick", action="store_true", help="a glimpse: " + str(QUICK))
    args = parser.parse_args(argv)
    full = {"workloads": list(WORKLOADS), "limit": 24, "history": 400, "max_tokens": 160}
    for name, value in (QUICK if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    sys.exit(main())
