"""Measure the verify cost c(n) of a model on this machine: seconds of one forward, by rows.

The result is what `valuspec replay --cost` and `python -m jobs.recalibrate --cost` take.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

EXAMPLE = """example:
  valuspec cost --model smollm2 --out cost.json
  valuspec cost --model ./my-model --device cuda --batch-sizes 1 4 16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2",
        help="'smollm2' (built in), a local folder, a .gguf file or a hub id (%(default)s)",
    )
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--fast", action="store_true", help="the cost of fast mode, as in serve")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="(%(default)s)"
    )
    parser.add_argument("--num-threads", type=int, help="CPU threads of the model (all cores)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write it as JSON")


def run(options: argparse.Namespace) -> int:
    """Print milliseconds by rows and batch size; return the exit code."""
    if min(options.batch_sizes) < 1:
        print("valuspec cost: batch sizes start at 1", file=sys.stderr)
        return 2
    import torch

    from jobs.report import write_whole
    from valuspec.engine.measure import measure_cost
    from valuspec.engine.target import Target
    from valuspec.errors import ModelError

    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    try:
        target = Target.load(
            options.model, dtype=options.dtype, device=options.device, exact=not options.fast
        )
    except ModelError as error:
        print(f"valuspec cost: {error}", file=sys.stderr)
        return 1
    costs = {b: measure_cost(target, batch_size=b) for b in sorted(set(options.batch_sizes))}
    rows = sorted({n for cost in costs.values() for n in cost.rows})
    print("rows per request" + "".join(f"{f'batch {b}':>12}" for b in costs))
    for n in rows:
        cells = [
            f"{1e3 * cost.seconds[cost.rows.index(n)]:.1f} ms" if n in cost.rows else ""
            for cost in costs.values()
        ]
        print(f"{n:<16}" + "".join(f"{cell:>12}" for cell in cells))
    if options.out:
        content = {
            "model": Path(options.model).name,
            "model_fingerprint": target.model_fingerprint,
            "dtype": options.dtype,
            "device": options.device,
            "exact_mode": target.exact_mode,
            "threads": torch.get_num_threads(),
            "machine": platform.processor() or platform.machine(),
            "costs": {str(b): cost.to_json() for b, cost in costs.items()},
        }
        write_whole(options.out, json.dumps(content, indent=1) + "\n")
        print(f"written to {options.out}")
    return 0
