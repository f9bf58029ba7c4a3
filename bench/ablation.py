"""What each piece of evidence brings, by replay: no model, no GPU.

    python -m bench.ablation --data DIR [--workloads gsm8k ...] [--limit N] --out FILE.json

DIR holds the target's answers (`bench.answers`). Per workload, the history answers fill the shared
store and are retrieved from; rates, price and tau come from the calibration answers; the figures
are of the test answers. All rows but the last ones value the same candidate trees. Rows that need
the target's top-k appear where the answers were written with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.variants import Answer, Outcome, Variant, bounds, gather, learn_table, try_out
from retrieval.faiss_index import FaissIndex
from retrieval.service import RetrievalService
from retrieval.store import InMemoryStore
from valuspec.cost import CostStaircase
from valuspec.drafting.drafter import Drafter
from valuspec.replay import Trajectory, filtered, replay
from valuspec.thresholds import ThresholdSet

WORKLOADS = ("humaneval", "gsm8k", "dolly", "specbench", "spider", "banking77", "extraction")
SPLITS = ("history", "calibration", "test")

SHIPPED = ("share", "own_share", "count", "length")
VARIANTS = {
    "raw frequency": Variant(rate="frequency"),
    "smoothed frequency": Variant(rate="smoothed"),
    "counted frequency": Variant(("frequency", "count")),
    "+ match length": Variant(("frequency", "count", "length")),
    "+ source": Variant(("frequency", "count", "length", "sources")),
    "weighted share": Variant(("share", "count")),
    "+ own share": Variant(("share", "own_share", "count")),
    "+ match length (shipped)": Variant(SHIPPED),
    "shipped, fixed tau": Variant(SHIPPED, fixed_tau=True),
    "shipped + depth": Variant((*SHIPPED, "depth")),
    "shipped + source": Variant((*SHIPPED, "sources")),
    "shipped + request similarity": Variant((*SHIPPED, "similarity")),
}
TOP_K_VARIANTS = {
    "shipped + last-step top-k": Variant(("share", "last_rank", *SHIPPED[1:])),
    "shipped + transfer table": Variant(("share", "table_rank", *SHIPPED[1:])),
}
GROWN = "transfer table as source too"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.ablation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="answers by bench.answers")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--limit", type=int, help="use the first N answers of each file")
    parser.add_argument("--max-tokens", type=int, default=160, help="the answers' limit")
    parser.add_argument("--trees", type=int, default=16, help="draft trees retrieved per request")
    parser.add_argument("--cost", type=Path, help="JSON of a cost staircase (the shipped set's)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)

    cost = ThresholdSet.starting("").buckets[0].cost
    if args.cost:
        cost = CostStaircase.from_json(json.loads(args.cost.read_text()))
    results: dict[str, dict[str, Outcome]] = {}
    speeds = {}
    for workload in args.workloads:
        history, calibration, test = (
            read(args.data / f"{workload}.{split}.jsonl", args.limit, args.max_tokens)
            for split in SPLITS
        )
        results[workload], speeds[workload] = ablate(history, calibration, test, cost, args.trees)
        print(f"\n{workload}  (replay: {speeds[workload]:,.0f} tokens/s)")
        _print(results[workload])
    common_rows = [
        name for name in results[args.workloads[0]] if all(name in r for r in results.values())
    ]
    means = {
        name: float(np.exp(np.mean([np.log(r[name].speedup) for r in results.values()])))
        for name in common_rows
    }
    print("\ngeometric mean of the speedups")
    common.print_table(("way", "speedup"), list(means.items()))
    args.out.write_text(
        json.dumps(
            {
                "cost": cost.to_json(),
                "workloads": {
                    workload: {name: asdict(outcome) for name, outcome in rows.items()}
                    for workload, rows in results.items()
                },
            },
            indent=1,
        )
    )
    common.print_json(
        {
            "geometric_mean": means,
            "replay_tok_s": speeds,
            "cost": cost.to_json(),
            "environment": common.environment(),
        }
    )
    return 0


def read(path: Path, limit: int | None, max_tokens: int) -> list[Answer]:
    """Answers of a file; those of one token have nothing to draft and are left out."""
    answers = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record: dict[str, Any] = json.loads(line)
            prompt, output = (np.array(record[k], np.int32) for k in ("prompt_ids", "output_ids"))
            if len(output) > 1:
                trajectory = Trajectory(prompt, output, max_tokens, namespace=common.NAMESPACE)
                answers.append(Answer(trajectory, top_ids=record.get("top_ids", ())))
    return answers[:limit]


def ablate(
    history: list[Answer],
    calibration: list[Answer],
    test: list[Answer],
    cost: CostStaircase,
    num_trees: int,
) -> tuple[dict[str, Outcome], float]:
    """Outcomes by row, and replayed tokens per second of CPU time with the shipped thresholds."""
    drafter = Drafter(shared_tokens=1 << 20)
    for answer in history:
        t = answer.trajectory
        drafter.remember(t.namespace, t.prompt_ids, t.output_ids)
    calibration, test = with_trees(history, [calibration, test], num_trees)
    table = learn_table(history)
    variants = dict(VARIANTS)
    if table and all(a.top_ids for a in (*calibration, *test)):
        variants |= TOP_K_VARIANTS
    learnt, judged = (
        gather(answers, drafter, table, grow=False) for answers in (calibration, test)
    )
    rows = {name: try_out(variant, learnt, judged, cost) for name, variant in variants.items()}
    rows |= bounds(judged, cost)
    if len(variants) > len(VARIANTS):
        learnt, judged = (
            gather(answers, drafter, table, grow=True) for answers in (calibration, test)
        )
        rows[GROWN] = try_out(TOP_K_VARIANTS["shipped + transfer table"], learnt, judged, cost)
        rows["oracle of " + GROWN] = bounds(judged, cost)["oracle"]
    started = time.process_time()
    select = filtered(ThresholdSet.starting(""))
    tally = replay([a.trajectory for a in test], drafter, select, cost)
    return rows, tally.num_tokens / (time.process_time() - started)


def with_trees(
    history: Sequence[Answer], splits: Sequence[Sequence[Answer]], k: int
) -> list[list[Answer]]:
    """The answers of each split with the draft trees retrieved for their prompts."""

    async def run() -> list[list[Answer]]:
        size = 1 + max(
            int(max(a.trajectory.prompt_ids.max(), a.trajectory.output_ids.max()))
            for answers in (history, *splits)
            for a in answers
        )
        service = RetrievalService(InMemoryStore(), FaissIndex, vocab_size=size)
        for answer in history:
            t = answer.trajectory
            await service.write_back(t.namespace, t.prompt_ids.tolist(), t.output_ids.tolist())
        found: list[list[Answer]] = []
        for answers in splits:
            found.append([])
            for a in answers:
                t = a.trajectory
                hits = await service.lookup(t.namespace, t.prompt_ids.tolist(), k, deadline_s=60.0)
                served = Trajectory(
                    t.prompt_ids, t.output_ids, t.max_tokens, tuple(hits.trees), t.namespace
                )
                found[-1].append(Answer(served, max(hits.similarities, default=0.0), a.top_ids))
        await service.aclose()
        return found

    return asyncio.run(run())


def _print(rows: dict[str, Outcome]) -> None:
    oracle = rows["oracle"].speedup
    common.print_table(
        ("way", "speedup", "accept. len", "nodes", "AUC", "ECE", "of oracle"),
        [
            (
                name,
                o.speedup,
                o.acceptance_length,
                o.nodes_per_step,
                o.quality.auc if o.quality else "",
                o.quality.expected_calibration_error if o.quality else "",
                o.speedup / oracle,
            )
            for name, o in rows.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
