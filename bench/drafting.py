"""What drafting and valuation cost per step, without a model.

    python -m bench.drafting [--context N] [--stored N] [--trees N]

Text with the repetition of real answers is made up from a Zipf vocabulary and a stock of phrases,
so that the chains are as long as they get: every step finds matches in all three sources.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench import common
from valuspec.drafting.drafter import Drafter
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree
from valuspec.valuation import keep, values

NAMESPACE = "bench"
ANSWER_TOKENS = 160
STEP_TOKENS = 3
"""Tokens a step produces."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.drafting", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--context", type=int, default=1000, help="prompt tokens")
    parser.add_argument("--stored", type=int, default=50_000, help="tokens in the shared store")
    parser.add_argument("--trees", type=int, default=16, help="retrieved draft trees")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args(argv)

    filtered = partial(keep, batch_size=1, max_nodes=64)
    write = _writer(np.random.default_rng(0))
    drafter = Drafter(shared_tokens=args.stored)
    for _ in range(-(-args.stored // ANSWER_TOKENS)):
        drafter.remember(NAMESPACE, write(16), write(ANSWER_TOKENS))
    trees = [DraftTree.from_paths([write(ANSWER_TOKENS)]) for _ in range(args.trees)]
    thresholds = ThresholdSet.starting("bench")
    parts: dict[str, list[float]] = {
        "start session": [], "add retrieved": [], "extend": [], "propose": [], "values": [],
        "keep (with values)": [],
    }  # fmt: skip

    def timed(part: str, call: Callable[..., object], *inputs: object) -> object:
        started = time.perf_counter()
        result = call(*inputs)
        parts[part].append(time.perf_counter() - started)
        return result

    nodes = []
    for step in range(args.steps):
        if step % 50 == 0:
            prompt = write(args.context)
            session = drafter.start(NAMESPACE, prompt)  # compiles on the first one
            timed("start session", drafter.start, NAMESPACE, prompt)
            timed("add retrieved", session.add_retrieved, trees)
        tokens = write(STEP_TOKENS)
        timed("extend", session.extend, tokens)
        candidate = session.propose()
        timed("propose", session.propose)
        timed("values", values, candidate, thresholds)
        timed("keep (with values)", filtered, candidate, thresholds)
        nodes.append(len(candidate))
    microseconds = {
        part: (1e6 * float(np.median(times)), 1e6 * float(np.percentile(times, 99)))
        for part, times in parts.items()
    }
    common.print_table(("part", "median us", "99 % us"), [(p, *t) for p, t in microseconds.items()])
    per_step = ("extend", "propose", "keep (with values)")
    common.print_json(
        {
            "step_us": sum(microseconds[part][0] for part in per_step),
            "median_us": {part: median for part, (median, _) in microseconds.items()},
            "p99_us": {part: p99 for part, (_, p99) in microseconds.items()},
            "offered_nodes": float(np.mean(nodes)),
            "settings": vars(args),
            "environment": common.environment(),
        }
    )
    return 0


def _writer(rng: np.random.Generator) -> Callable[[int], list[int]]:
    """Makes token ids: phrases of 2 to 12 Zipf-distributed tokens, each phrase used many times."""
    phrases = [rng.zipf(1.3, rng.integers(2, 13)) % 30_000 for _ in range(2000)]

    def write(length: int) -> list[int]:
        picked: list[NDArray[np.int64]] = []
        while sum(map(len, picked)) < length:
            picked.append(phrases[int(rng.zipf(1.2)) % len(phrases)])
        written: list[int] = np.concatenate(picked)[:length].tolist()
        return written

    return write


if __name__ == "__main__":
    sys.exit(main())
