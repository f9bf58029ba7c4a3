"""What would I gain? Predicts the speedup of draft trees from answers already given.

Takes trajectory logs (Parquet files, or folders of them), or JSON lines of prompts and answers from
any other server, as token ids or, with --tokenizer, as text; `jobs/transcripts.py` says how.
No model is run and no GPU is needed: greedy answers are known, so what any tree would have had
accepted is known, and the cost staircase gives the time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLE = """example:
  valuspec replay answers.jsonl --tokenizer smollm2
  valuspec replay ~/.cache/valuspec/log --cost cost.json --out gain/"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="logs or JSON lines")
    parser.add_argument(
        "--tokenizer",
        help="for text: a folder, a hub id, a .gguf file or 'smollm2' (needs its packages)",
    )
    parser.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="written by `valuspec cost`; without, what the log says, else SmolLM2-135M on two "
        "CPU cores",
    )
    parser.add_argument(
        "--thresholds", type=Path, metavar="FILE", help="set to compare with (the shipped one)"
    )
    parser.add_argument(
        "--trees", type=int, default=16, help="draft trees retrieved per request (%(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, help="spread over so many Ray workers (this process)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("replay-report"), help="folder of the report (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the prediction and write the report; return the exit code."""
    # matplotlib and the rest are not needed to say --help.
    from jobs.prediction import predict
    from valuspec.errors import ValuSpecError

    try:
        return predict(
            options.files,
            tokenizer=options.tokenizer,
            cost_file=options.cost,
            threshold_file=options.thresholds,
            num_trees=options.trees,
            num_workers=options.workers,
            out=options.out,
        )
    except (ValuSpecError, OSError) as error:
        print(f"valuspec replay: {error}", file=sys.stderr)
        return 2
