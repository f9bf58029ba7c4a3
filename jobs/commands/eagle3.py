"""Train an EAGLE-3 draft head for a target, on the target's own answers to your prompts.

The answers, their features, checkpoints and the head are kept in the output folder; the same
command goes on where an earlier one stopped. Prompts you will measure with do not belong here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLE = """example:
  valuspec eagle3 train --target smollm2 --prompts prompts.jsonl --out head/
  valuspec serve --draft hybrid --draft-head head/"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["train"], help="what to do")
    parser.add_argument(
        "--target",
        default="smollm2",
        help="'smollm2' (built in), a local folder, a .gguf file or a hub id (%(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines with turns, messages, prompt or prompt_ids",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the head goes"
    )
    parser.add_argument("--epochs", type=float, default=4.0, help="(%(default)s)")
    parser.add_argument("--batch-answers", type=int, default=5, help="(%(default)s)")
    parser.add_argument(
        "--steps-ahead", type=int, default=4, help="how far the head is unrolled (%(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--draft-vocabulary", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer (%(default)s)")
    parser.add_argument("--num-threads", type=int, help="CPU threads (all cores)")


def run(options: argparse.Namespace) -> int:
    """Train, print the acceptance by position, return the exit code."""
    import torch

    from jobs.eagle3.train import Plan, train
    from valuspec.errors import ValuSpecError

    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    plan = Plan(
        epochs=options.epochs,
        batch_answers=options.batch_answers,
        num_steps=options.steps_ahead,
        learning_rate=options.learning_rate,
        draft_vocab_size=options.draft_vocabulary,
        max_tokens=options.max_tokens,
    )
    try:
        figures = train(options.target, options.prompts, options.out, plan)
    except (ValuSpecError, OSError) as error:
        print(f"valuspec eagle3: {error}", file=sys.stderr)
        return 1
    print("accepted by position, if all before it were; on answers kept apart")
    for width, shares in figures["acceptance"].items():
        print(f"{width:<8}" + "".join(f"{share:8.3f}" for share in shares))
    print(f"written to {options.out}")
    return 0
