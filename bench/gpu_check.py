"""Is the GPU path exact here, and what does it cost? Under three minutes for a small model.

    python -m bench.gpu_check [--model smollm2] [--dtype bfloat16] [--max-tokens 32]

Compares three ways to run the same target, in one table each:

    torch    attention by matrix products, kernels launched one by one
    triton   attention by our kernels, launched one by one
    graphs   the same, steps of up to 64 rows recorded and replayed

1. The start-up probe of each, row by row: with rows on their own, and in the fixed envelope.
2. The last one's answers to a few prompts with speculation, against its plain ones, token by token
   and bit by bit; once alone and once in mixed batches.
3. Milliseconds of one decoding step by rows per sequence (1 is plain), for each batch size.

Ends with 1 if a difference was found where the probe promised none, and with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench import common
from bench.identity import IdentityCheck
from valuspec.cost import CostStaircase
from valuspec.engine.measure import measure_cost
from valuspec.engine.probe import ENVELOPE, choose_exact_mode, probe
from valuspec.engine.target import Target
from valuspec.engine.two_zone import TwoZoneAttention
from valuspec.engine.types import SamplingParams
from valuspec.errors import ValuSpecError

QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shop sells 3 apples for 2 dollars. What do 12 apples cost?",
    "Name the planets of the solar system in order from the sun.",
    "SELECT the names of all customers who ordered twice in May.",
)
MODES = ("cold", "truth", "mixed")
REPEATS = 20
MIN_WIDTHS = {"rows": 4, "envelope": ENVELOPE}


def ways(target: Target) -> dict[str, Target]:
    """The same weights run in each way; a target without recordings is run as it is."""
    torch_way = replace(target, attention=TwoZoneAttention, graphs=None)
    own = {"triton": replace(target, graphs=None), "graphs": target}
    return {"torch": torch_way} | (own if target.graphs is not None else {"as it is": target})


def probes(targets: Mapping[str, Target]) -> dict[str, dict[str, Any]]:
    """Rows compared and equal, by way and mode; leaves each target in the mode it passed."""
    found: dict[str, dict[str, Any]] = {}
    for name, target in targets.items():
        found[name] = {}
        for mode, target.min_width in MIN_WIDTHS.items():
            result = probe(target)
            found[name][mode] = {"checked": result.rows_checked, "equal": result.rows_equal}
        target.exact_mode, target.min_width = choose_exact_mode(target)
        found[name]["exact_mode"] = target.exact_mode
    header = ("probe", *(f"{mode}: rows equal" for mode in MIN_WIDTHS), "mode chosen")
    counts = {
        name: [f"{each[mode]['equal']} of {each[mode]['checked']}" for mode in MIN_WIDTHS]
        for name, each in found.items()
    }
    common.print_table(header, [(name, *counts[name], found[name]["exact_mode"]) for name in found])
    return found


def identity(target: Target, prompts: Sequence[common.Prompt], max_tokens: int) -> dict[str, Any]:
    """Speculative answers against plain ones, by mode of `bench.identity`."""
    check = IdentityCheck(target, prompts, SamplingParams(max_tokens=max_tokens))
    tallies = {name: check.modes()[name]() for name in MODES}
    common.print_table(
        ("answers", "requests", "identical", "logit rows", "equal", "accepted"),
        [
            (name, t.requests, t.identical, t.logit_rows_checked, t.logit_rows_equal,
             t.accepted_tokens)
            for name, t in tallies.items()
        ],
    )  # fmt: skip
    return {name: tally.to_json() for name, tally in tallies.items()}


def step_costs(targets: Mapping[str, Target], batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Milliseconds of one forward, by batch size, way and rows of each sequence."""
    found: dict[str, Any] = {}
    for size in batch_sizes:
        costs: dict[str, CostStaircase] = {}
        for name, target in targets.items():
            measure_cost(target, batch_size=size, repeats=1)  # compiles and records
            costs[name] = measure_cost(target, batch_size=size, repeats=REPEATS)
        rows = next(iter(costs.values())).rows
        columns = [[1000 * seconds for seconds in cost.seconds] for cost in costs.values()]
        common.print_table(
            (f"ms, batch of {size}", *costs), list(zip(map(str, rows), *columns, strict=True))
        )
        found[str(size)] = {name: cost.to_json() for name, cost in costs.items()}
    return found


def check(target: Target, max_tokens: int, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Everything this program measures, printed and as one document."""
    targets = ways(target)
    probed = probes(targets)
    prompts = [
        common.Prompt(str(i), tuple(target.encode(question)))
        for i, question in enumerate(QUESTIONS)
    ]
    answers = identity(target, prompts, max_tokens)
    return {
        "exact": target.exact,
        "kept": not target.exact or all(each["exact"] for each in answers.values()),
        "probe": probed,
        "identity": answers,
        "costs": step_costs(targets, batch_sizes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device on this machine", file=sys.stderr)
        return 2
    started = time.perf_counter()
    try:
        target = Target.load(args.model, dtype=args.dtype, device="cuda", exact=False)
        result = check(target, args.max_tokens, args.batch_sizes)
    except ValuSpecError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    common.print_json(
        {
            **result,
            "device": torch.cuda.get_device_name(),
            "seconds": time.perf_counter() - started,
            "settings": {name: str(value) for name, value in vars(args).items()},
            "environment": common.environment(),
        }
    )
    return 0 if result["kept"] else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
