"""Write the target's greedy answers to files, for programs that replay them without a model.

    python -m bench.answers --prompts DIR --out DIR --workloads gsm8k ... [--top-k 8]

DIR/WORKLOAD.SPLIT.jsonl becomes a file of the same name: a line per request with its id,
`prompt_ids` and `output_ids`, and with --top-k the `top_ids`: for each output token, the tokens
the target held likeliest at its place, the likeliest first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import common
from valuspec.engine.kv_cache import own_blocks
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.replay import Trajectory

SPLITS = ("history", "calibration", "test")
CHUNK = 256


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.answers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", required=True)
    parser.add_argument("--limit", type=int, help="use the first N requests of each file")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--top-k", type=int, default=0, help="takes a prefill per answer")
    args = parser.parse_args(argv)

    target = Target.load(args.model, dtype=args.dtype)
    args.out.mkdir(parents=True, exist_ok=True)
    total = 0
    for workload in args.workloads:
        for split in SPLITS:
            name = f"{workload}.{split}.jsonl"
            prompts = common.load_prompts(args.prompts / name, target, args.limit)
            answers = common.trajectories(target, prompts, args.max_tokens)
            with (args.out / name).open("w", encoding="utf-8") as file:
                for prompt, answer in zip(prompts, answers, strict=True):
                    record = {"id": prompt.request_id, "prompt_ids": answer.prompt_ids.tolist(),
                              "output_ids": answer.output_ids.tolist()}  # fmt: skip
                    if args.top_k:
                        record["top_ids"] = top_ids(target, answer, args.top_k)
                    file.write(json.dumps(record) + "\n")
            total += len(answers)
            print(f"{name}: {len(answers)} answers", flush=True)
    common.print_json({"answers": total, "model_fingerprint": target.model_fingerprint})
    return 0


def top_ids(target: Target, answer: Trajectory, k: int) -> list[list[int]]:
    """The k likeliest tokens at the place of each output token, read off a prefill."""
    inputs = np.concatenate([answer.prompt_ids, answer.output_ids[:-1]])
    cache = target.new_cache(own_blocks(1, len(inputs)))
    first = len(answer.prompt_ids) - 1  # this row yields the first output token
    found: list[list[int]] = []
    for start in range(0, len(inputs), CHUNK):
        chunk = inputs[start : start + CHUNK]
        rows = np.arange(min(max(first - start, 0), len(chunk) - 1), len(chunk))
        logits = target.forward([SequenceRows.chain(0, start, chunk)], cache, rows)
        if start + len(chunk) > first:
            found += logits.topk(k).indices.tolist()
    return found


if __name__ == "__main__":
    sys.exit(main())
