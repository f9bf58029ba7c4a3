"""What is measured: requests, what occurred before them, and the filters that are compared."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench import common, heads
from valuspec import replay
from valuspec.calibration import calibrate
from valuspec.cost import CostStaircase, LiveCosts
from valuspec.eagle3.loading import SHIPPED_HEAD
from valuspec.engine.engine import Engine
from valuspec.engine.head_source import HeadChoice
from valuspec.engine.target import Target
from valuspec.replay import Select, Trajectory
from valuspec.thresholds import ThresholdSet

FREQUENCY_SIZES = (4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Workload:
    """Ready to be decoded in every mode.

    tests:      the test requests, their answers still unknown, with the draft trees retrieved
    thresholds: of the mode `filtered`, and of `retrieval` where that is another one
    selects:    by mode, which nodes to keep, given what the target goes on with
    """

    drafter: common.FrozenDrafter
    prompts: list[common.Prompt]
    tests: list[Trajectory]
    thresholds: dict[str, ThresholdSet]
    selects: dict[str, Select]
    choice: HeadChoice | None
    head: heads.HeadReplay | None

    def engines(self, target: Target, costs: Mapping[int, CostStaircase]) -> dict[str, Engine]:
        """By mode: the engine that decodes so, for as many streams as there are costs for."""
        found = {}
        for name, thresholds in self.thresholds.items():
            found[name] = Engine(
                target,
                drafter=self.drafter,
                thresholds=thresholds,
                max_batch_size=max(costs),
                reuse_prefixes=False,  # else all modes but the first find their prompts computed
                head=self.choice if name == "filtered" else None,
            )
            found[name].live_costs = LiveCosts(dict(costs))
        return {mode: found.get(mode, found["filtered"]) for mode in self.selects}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--history", type=Path, required=True, help="requests answered before")
    parser.add_argument("--calibration", type=Path, required=True, help="requests to learn from")
    parser.add_argument("--test", type=Path, required=True, help="requests to measure with")
    parser.add_argument("--thresholds", type=Path, help="use this set instead of calibrating")
    parser.add_argument("--draft", choices=("retrieval", "eagle3", "hybrid"), default="retrieval")
    parser.add_argument("--draft-head", type=Path, default=SHIPPED_HEAD, help="an EAGLE-3 head")
    parser.add_argument("--limit", type=int, help="use the first N test requests")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--trees", type=int, default=16, help="draft trees retrieved per request")
    parser.add_argument("--shared-tokens", type=int, default=1 << 17, help="shared store's size")


def prepare(
    args: argparse.Namespace, target: Target, costs: Mapping[int, CostStaircase], streams: int = 1
) -> Workload:
    """Answer what was asked before, and learn from it.

    costs: verify costs by batch size; streams: for how many the fixed size is to be the best
    """
    files = (args.history, args.calibration, args.test)
    prompts = [common.load_prompts(f, target) for f in files]
    prompts[2] = prompts[2][: args.limit]
    history, calibration = (
        common.trajectories(target, p, args.max_tokens) for p in prompts[:2]
    )  # fmt: skip
    drafter = common.FrozenDrafter(shared_tokens=args.shared_tokens)
    drafter.stock(history)
    tests = [
        Trajectory(
            np.array(p.token_ids, np.int32),
            np.empty(0, np.int32),
            args.max_tokens,
            namespace=common.NAMESPACE,
        )
        for p in prompts[2]
    ]
    queries = [*calibration, *tests]
    trees = common.retrieve(history, queries, target.vocab_size, args.trees)
    queries = [replace(t, retrieved=r) for t, r in zip(queries, trees, strict=True)]
    calibration, tests = queries[: len(calibration)], queries[len(calibration) :]
    if args.thresholds is not None:
        of_retrieval = ThresholdSet.load(args.thresholds)
        of_retrieval.validate(model_fingerprint=target.model_fingerprint)
    else:
        of_retrieval = calibrate(
            calibration,
            drafter,
            costs,
            model_fingerprint=target.model_fingerprint,
            provenance={"made_by": "bench.speed"},
        )
    choice, head = heads.load(target, args.draft, args.draft_head), None
    if choice is None:
        thresholds = {"filtered": of_retrieval}
        fixed = _best_frequency(calibration, drafter, costs[streams])
    else:
        head = heads.HeadReplay(target, choice, drafter)
        offered = head.offers(calibration)
        thresholds = {"filtered": head.calibrate(offered, costs), "retrieval": of_retrieval}
        fixed = head.best_size(offered, costs[streams])
    selects: dict[str, Select] = {
        "plain": replay.plain,
        "unfiltered": replay.unfiltered,
        "frequency": fixed,
        **{name: replay.filtered(some) for name, some in thresholds.items()},
        "oracle": replay.oracle,
    }
    return Workload(drafter, prompts[2], tests, thresholds, selects, choice, head)


def _best_frequency(
    calibration: Sequence[Trajectory], drafter: common.FrozenDrafter, cost: CostStaircase
) -> Select:
    choices = [replay.most_frequent(size) for size in FREQUENCY_SIZES]
    speeds = [replay.replay(calibration, drafter, c, cost).tok_s for c in choices]
    return choices[int(np.argmax(speeds))]
