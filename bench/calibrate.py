"""Make a threshold set from requests: answers by the target, verify cost by this machine.

    python -m bench.calibrate --history H.jsonl... --calibration C.jsonl... --out SET.json

Several workloads go into one shared store, as on a replica that serves them all, so the rates
know distractors. This made the starting set in valuspec/data; a deployment recalibrates from its
own log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import common, heads
from valuspec.calibration import calibrate, reliability
from valuspec.drafting.drafter import Drafter
from valuspec.engine.measure import measure_cost
from valuspec.engine.target import Target
from valuspec.evidence import NUM_OCCURRENCE_CODES
from valuspec.replay import Trajectory, filtered, plain, replay, unfiltered
from valuspec.thresholds import ThresholdSet

BATCH_SIZES = (1, 2, 4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.calibrate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--history", type=Path, nargs="+", required=True)
    parser.add_argument("--calibration", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, help="use the first N requests of each file")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--trees", type=int, default=16, help="draft trees retrieved per request")
    parser.add_argument("--draft-head", type=Path, help="count its edges as well, alone and hybrid")
    parser.add_argument("--head-limit", type=int, help="with every Nth calibration answer only")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)

    target = Target.load(args.model, dtype=args.dtype)
    costs = {size: measure_cost(target, batch_size=size) for size in BATCH_SIZES}

    def answers(files: Sequence[Path]) -> list[Trajectory]:
        prompts = [common.load_prompts(file, target, args.limit) for file in files]
        return [t for p in prompts for t in common.trajectories(target, p, args.max_tokens)]

    history, calibration = answers(args.history), answers(args.calibration)
    drafter = common.FrozenDrafter(shared_tokens=1 << 20)
    drafter.stock(history)
    trees = common.retrieve(history, calibration, target.vocab_size, args.trees)
    calibration = [replace(t, retrieved=r) for t, r in zip(calibration, trees, strict=True)]
    made = calibrate(
        calibration,
        drafter,
        costs,
        model_fingerprint=target.model_fingerprint,
        provenance={
            "made_by": "bench.calibrate",
            "model": Path(args.model).name,
            "history": sorted(file.name for file in args.history),
            "calibration": sorted(file.name for file in args.calibration),
            "num_trajectories": len(calibration),
            "environment": common.environment(),
        },
    )
    if args.draft_head is not None:
        made = _with_head(made, target, args.draft_head, drafter, calibration, args.head_limit)
    args.out.write_text(made.to_json() + "\n")

    rows = []
    for bucket in made.buckets:
        select = filtered(made, batch_size=bucket.max_batch_size)
        base = replay(calibration, drafter, plain, bucket.cost).tok_s
        kept = replay(calibration, drafter, select, bucket.cost)
        everything = replay(calibration, drafter, unfiltered, bucket.cost)
        rows.append(
            (
                bucket.max_batch_size,
                bucket.tau,
                bucket.stream_tok_s,
                kept.tok_s / base,
                everything.tok_s / base,
                kept.mean_acceptance_length,
                kept.nodes_per_step,
            )
        )
    common.print_table(
        ("batch", "tau", "tok/s a stream", "speedup", "unfiltered", "accept. len", "nodes"), rows
    )
    quality = reliability(calibration, drafter, made)
    common.print_json(
        {
            "version": made.version,
            "model_fingerprint": made.model_fingerprint,
            "num_trajectories": len(calibration),
            "num_labels": int(made.seen.sum()),
            "speedup": {str(row[0]): row[3] for row in rows},
            "ece": quality.expected_calibration_error,
            "auc": quality.auc,
        }
    )
    return 0


def _with_head(
    made: ThresholdSet,
    target: Target,
    folder: Path,
    drafter: Drafter,
    answers: Sequence[Trajectory],
    every: int | None,
) -> ThresholdSet:
    """The set with the transfers of a draft head's edges; those that only occurred stay."""
    seen, taken = made.seen.copy(), made.taken.copy()
    for draft in ("eagle3", "hybrid"):
        choice = heads.load(target, draft, folder)
        assert choice is not None
        replay_ = heads.HeadReplay(target, choice, drafter)
        offered = replay_.offers(answers[:: every or 1])
        counted = replay_.calibrate(offered, {1: made.buckets[0].cost})
        seen[NUM_OCCURRENCE_CODES:] += counted.seen[NUM_OCCURRENCE_CODES:]
        taken[NUM_OCCURRENCE_CODES:] += counted.taken[NUM_OCCURRENCE_CODES:]
    return replace(made, seen=seen, taken=taken)


if __name__ == "__main__":
    sys.exit(main())
