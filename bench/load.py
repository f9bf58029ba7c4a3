"""What a service gains from speculation when it is busy, and that nobody's answer changes.

    python -m bench.load --test T.jsonl --history H.jsonl [--concurrency 1,2,4,8,16]
    python -m bench.load --test T.jsonl --history H.jsonl --url http://127.0.0.1:8000

A closed loop: so many clients each ask their next question as soon as they have an answer. Each
level asks the same questions with and without speculation, in turns. History answers fill the
stores first.

By itself it runs an engine in this process, a new one for each turn, so no turn meets what another
left behind. With --url it asks a running app, which remembers: every level then has questions of
its own, answered with speculation first; plain answers use a cache apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench import common
from bench.clients import Client, EngineClient, HttpClient, Timed
from valuspec.engine.engine import Engine
from valuspec.engine.target import Target
from valuspec.replay import Trajectory
from valuspec.thresholds import ThresholdSet


@dataclass(slots=True)
class Turn:
    """One pass over a level's questions."""

    seconds: float
    answers: list[Timed]

    @property
    def tok_s(self) -> float:
        return sum(len(a.token_ids) for a in self.answers) / self.seconds


@dataclass(slots=True)
class Level:
    """Turns at one concurrency, without and with speculation."""

    plain: list[Turn] = field(default_factory=list)
    speculative: list[Turn] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        plain, speculative = (
            statistics.median(turn.tok_s for turn in turns)
            for turns in (self.plain, self.speculative)
        )
        pairs = [
            (a, b)
            for without, with_ in zip(self.plain, self.speculative, strict=True)
            for a, b in zip(without.answers, with_.answers, strict=True)
        ]
        return {
            "plain_tok_s": plain,
            "speculative_tok_s": speculative,
            "ratio": speculative / plain,
            "compared": len(pairs),
            "identical": sum(a.token_ids == b.token_ids for a, b in pairs),
            "failures": sum(x.error is not None for pair in pairs for x in pair),
            "plain": _latency(self.plain),
            "speculative": _latency(self.speculative),
        }


def _latency(turns: Sequence[Turn]) -> dict[str, float]:
    answers = [a for turn in turns for a in turn.answers if a.error is None]
    first = [a.first_token_s for a in answers] or [0.0]
    gaps = [gap for a in answers for gap in a.gaps_s] or [0.0]
    return {
        f"{name}_p{q}_ms": 1e3 * float(np.percentile(values, q))
        for name, values in (("ttft", first), ("itl", gaps))
        for q in (50, 95)
    }


async def ask_all(
    client: Client,
    prompts: Sequence[common.Prompt],
    concurrency: int,
    *,
    speculative: bool,
    title: str,
) -> Turn:
    """Put every question, `concurrency` at a time."""
    answers: list[Timed | None] = [None] * len(prompts)
    questions = iter(enumerate(prompts))
    started = time.perf_counter()
    with tqdm(total=len(prompts), desc=title, unit="answer", file=sys.stderr) as bar:

        async def one_client() -> None:
            for index, prompt in questions:
                answers[index] = await client.ask(prompt.token_ids, speculative=speculative)
                bar.update()

        await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return Turn(time.perf_counter() - started, [a for a in answers if a is not None])


def in_process(args: argparse.Namespace) -> dict[int, Level]:
    """Every turn with an engine of its own."""
    target = Target.load(args.model, dtype=args.dtype)
    history = common.trajectories(
        target, common.load_prompts(args.history, target), args.max_tokens
    )
    prompts = common.load_prompts(args.test, target, args.requests)
    drafter = common.FrozenDrafter(shared_tokens=1 << 17)
    drafter.stock(history)
    queries = [
        Trajectory(np.array(p.token_ids, np.int32), np.empty(0, np.int32), args.max_tokens)
        for p in prompts
    ]
    found = common.retrieve(history, queries, target.vocab_size, args.trees)
    trees = {p.token_ids: t for p, t in zip(prompts, found, strict=True)}
    thresholds = (
        ThresholdSet.starting(target.model_fingerprint)
        if args.thresholds is None
        else ThresholdSet.load(args.thresholds)
    )

    async def turn(concurrency: int, *, speculative: bool) -> Turn:
        engine = Engine(target, drafter=drafter, thresholds=thresholds, max_batch_size=concurrency)
        client = EngineClient(engine, args.max_tokens, common.NAMESPACE, trees)
        title = f"{concurrency} {'speculative' if speculative else 'plain'}"
        try:
            return await ask_all(client, prompts, concurrency, speculative=speculative, title=title)
        finally:
            await client.aclose()

    levels = {}
    for concurrency in args.concurrency:
        level = levels[concurrency] = Level()
        for _ in range(args.turns):
            level.plain.append(asyncio.run(turn(concurrency, speculative=False)))
            level.speculative.append(asyncio.run(turn(concurrency, speculative=True)))
    return levels


async def over_http(args: argparse.Namespace) -> dict[int, Level]:
    """One turn a level: what the app remembers of a first would serve a second."""
    target = Target.load(args.model, dtype=args.dtype, exact=False)  # for its chat template
    history = common.load_prompts(args.history, target)
    prompts = common.load_prompts(args.test, target)
    share = min(args.requests or len(prompts), len(prompts) // len(args.concurrency))
    client = HttpClient(args.url, args.max_tokens, os.environ.get("VALUSPEC_API_KEY", "none"))
    try:
        await ask_all(client, history, 8, speculative=True, title="history")
        levels = {}
        for number, concurrency in enumerate(args.concurrency):
            mine = prompts[number * share : (number + 1) * share]
            level = levels[concurrency] = Level()
            for speculative, turns in ((True, level.speculative), (False, level.plain)):
                title = f"{concurrency} {'speculative' if speculative else 'plain'}"
                turns.append(
                    await ask_all(client, mine, concurrency, speculative=speculative, title=title)
                )
        return levels
    finally:
        await client.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    levels = in_process(args) if args.url is None else asyncio.run(over_http(args))
    results = {concurrency: level.to_json() for concurrency, level in levels.items()}
    common.print_table(
        ("clients", "plain tok/s", "spec. tok/s", "ratio", "identical", "failures",
         "ttft p50/p95 plain", "spec.", "itl p50/p95 plain", "spec."),
        [_row(concurrency, r) for concurrency, r in results.items()],
    )  # fmt: skip
    common.print_json(
        {
            "concurrency": {str(concurrency): r for concurrency, r in results.items()},
            "settings": {name: str(value) for name, value in vars(args).items()},
            "environment": common.environment(),
        }
    )
    good = all(r["identical"] == r["compared"] and not r["failures"] for r in results.values())
    return 0 if good else 1


def _row(concurrency: int, r: dict[str, Any]) -> tuple[Any, ...]:
    kinds = [(name, mode) for name in ("ttft", "itl") for mode in ("plain", "speculative")]
    return (
        concurrency,
        r["plain_tok_s"],
        r["speculative_tok_s"],
        r["ratio"],
        f"{r['identical']}/{r['compared']}",
        r["failures"],
        *(_span(r[mode], name) for name, mode in kinds),
    )


def _span(latency: dict[str, float], name: str) -> str:
    return f"{latency[name + '_p50_ms']:.0f}/{latency[name + '_p95_ms']:.0f}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--test", type=Path, required=True, help="questions to measure with")
    parser.add_argument("--history", type=Path, required=True, help="questions answered before")
    parser.add_argument(
        "--concurrency",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1, 2, 4, 8, 16],
        help="clients, comma separated (1,2,4,8,16)",
    )
    parser.add_argument("--requests", type=int, help="ask the first N questions")
    parser.add_argument("--turns", type=int, default=2, help="turns of each kind, in process")
    parser.add_argument("--url", help="a running app; an engine in this process when absent")
    parser.add_argument("--thresholds", type=Path, help="set to use in process (the shipped one)")
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--trees", type=int, default=16, help="draft trees retrieved per request")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
