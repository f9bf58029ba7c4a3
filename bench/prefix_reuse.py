"""How much sooner the first token comes when prompts that begin alike are computed once.

    python -m bench.prefix_reuse --test T.jsonl --history H.jsonl [--requests N]

One engine shares the blocks of common beginnings and has met the history's prompts; another shares
nothing. Each question goes to both, in turns, alone; both must choose the same first token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench import common
from valuspec.drafting.drafter import Drafter
from valuspec.engine.engine import Engine
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, RequestStats, SamplingParams
from valuspec.thresholds import ThresholdSet


def first_token(engine: Engine, prompt: common.Prompt) -> tuple[float, int, RequestStats]:
    """Seconds to the first token, the token, and the request's counters."""
    started = time.perf_counter()
    engine.add(
        GenerationRequest(
            request_id=prompt.request_id,
            prompt_ids=prompt.token_ids,
            params=SamplingParams(max_tokens=1, speculative=False),
            namespace=common.NAMESPACE,
        )
    )
    while True:
        for output in engine.step():
            assert output.stats is not None
            return time.perf_counter() - started, output.token_ids[0], output.stats


def measure(
    target: Target, history: Sequence[common.Prompt], prompts: Sequence[common.Prompt]
) -> dict[str, Any]:
    def engine(*, reuse_prefixes: bool) -> Engine:
        return Engine(
            target,
            drafter=Drafter(),
            thresholds=ThresholdSet.starting(target.model_fingerprint),
            reuse_prefixes=reuse_prefixes,
        )

    engines = {"with": engine(reuse_prefixes=True), "without": engine(reuse_prefixes=False)}
    for prompt in tqdm(history, desc="history", file=sys.stderr):
        first_token(engines["with"], prompt)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    same = num_cached = 0
    for number, prompt in enumerate(tqdm(prompts, desc="questions", file=sys.stderr)):
        tokens = set()
        for which in ("with", "without") if number % 2 else ("without", "with"):
            elapsed, token, stats = first_token(engines[which], prompt)
            seconds[which].append(elapsed)
            tokens.add(token)
            num_cached += stats.num_cached_tokens
        same += len(tokens) == 1
    result: dict[str, Any] = {
        f"{which}_p{q}_ms": 1e3 * float(np.percentile(values, q))
        for which, values in seconds.items()
        for q in (50, 95)
    }
    return {
        **result,
        "speedup_p50": result["without_p50_ms"] / result["with_p50_ms"],
        "speedup_p95": result["without_p95_ms"] / result["with_p95_ms"],
        "cached_share": num_cached / sum(len(p.token_ids) for p in prompts),
        "prompt_tokens_p50": float(np.median([len(p.token_ids) for p in prompts])),
        "compared": len(prompts),
        "identical": same,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.prefix_reuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--test", type=Path, required=True, help="questions to measure with")
    parser.add_argument("--history", type=Path, required=True, help="questions met before")
    parser.add_argument("--requests", type=int, help="ask the first N questions")
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    target = Target.load(args.model, dtype=args.dtype)
    history = common.load_prompts(args.history, target)
    result = measure(target, history, common.load_prompts(args.test, target, args.requests))
    common.print_table(("what", "measured"), list(result.items()))
    settings = {name: str(value) for name, value in vars(args).items()}
    common.print_json({**result, "settings": settings, "environment": common.environment()})
    return 0 if result["identical"] == result["compared"] else 1


if __name__ == "__main__":
    sys.exit(main())
