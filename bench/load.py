"""What a service gains from speculation when it is busy, and that nobody's answer changes.

    python -m bench.load --test T.jsonl --history H.jsonl [--concurrency 1,2,4,8,16]
    python -m bench.load --test T.jsonl --history H.jsonl --url http://127.0.0.1:8000
    python -m bench.load --test T.jsonl --history H.jsonl --engine

Closed loops of so many clients over HTTP, in turns with and without speculation, after the history
has been asked once. Without --url the app is started for it, with an empty store. An app remembers:
every turn has questions of its own (a larger share where there are more clients), and plain
requests use a cache apart. --peer-url names another server, vLLM's for one, that gets the same
questions in turn with the app; start it with the same model.

With --engine there is no server: each turn runs a new engine in this process, so all of them may
ask all questions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench import common
from bench.clients import PLAIN, SPECULATIVE, EngineClient, HttpClient
from bench.closed_loop import Level, Turn, ask_all
from bench.own_app import own_app
from valuspec.engine.engine import Engine
from valuspec.engine.target import Target
from valuspec.errors import ValuSpecError
from valuspec.replay import Trajectory
from valuspec.thresholds import ThresholdSet

#: Clients that ask the history: enough to keep an app busy.
HISTORY_CLIENTS = 8
#: Questions that a peer answers before it is timed.
WARM_UP = 8
#: Fewer clients get as many questions as so many.
FEW_CLIENTS = 4


def in_process(args: argparse.Namespace) -> dict[int, Level]:
    """Every turn with an engine of its own."""
    target = Target.load(args.model, dtype=args.dtype)
    history = common.trajectories(
        target, common.load_prompts(args.history, target, args.history_limit), args.max_tokens
    )
    prompts = _questions(args, target)
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
        retrieved = trees if speculative else None
        client = EngineClient(engine, args.max_tokens, common.NAMESPACE, retrieved)
        title = f"{concurrency} {'speculative' if speculative else 'plain'}"
        return await ask_all(client, prompts, concurrency, title=title)

    levels = {}
    for concurrency in args.concurrency:
        level = levels[concurrency] = Level()
        for _ in range(args.turns):
            level.plain.append(asyncio.run(turn(concurrency, speculative=False)))
            level.speculative.append(asyncio.run(turn(concurrency, speculative=True)))
    return levels


async def over_http(args: argparse.Namespace, url: str) -> dict[int, Level]:
    target = Target.load(args.model, dtype=args.dtype, exact=False)  # for its chat template
    history = common.load_prompts(args.history, target, args.history_limit)
    key = os.environ.get("VALUSPEC_API_KEY", "none")
    async with contextlib.AsyncExitStack() as stack:

        def client(url: str, fields: Any) -> HttpClient:
            opened = HttpClient(url, args.max_tokens, fields, key)
            stack.push_async_callback(opened.aclose)
            return opened

        clients = {"plain": client(url, PLAIN), "speculative": client(url, SPECULATIVE)}
        await ask_all(clients["speculative"], history, HISTORY_CLIENTS, title="history")
        if args.peer_url is not None:
            clients["peer"] = client(args.peer_url, {"model": _model_of(args.peer_url)})
            await ask_all(clients["peer"], history[:WARM_UP], HISTORY_CLIENTS, title="peer warm-up")
        levels = {}
        systems = list(clients)
        for concurrency, turns in _shares(_questions(args, target), args.concurrency, args.turns):
            level = levels[concurrency] = Level()
            for questions in turns:
                for system in systems:
                    title = f"{concurrency} {system}"
                    turn = await ask_all(clients[system], questions, concurrency, title=title)
                    getattr(level, system).append(turn)
                systems.append(systems.pop(0))  # nobody is always the first
        return levels


def _questions(args: argparse.Namespace, target: Target) -> list[common.Prompt]:
    prompts = [p for path in args.test for p in common.load_prompts(path, target)]
    return prompts[: args.requests]


def _shares(
    prompts: Sequence[common.Prompt], levels: Sequence[int], num_turns: int
) -> list[tuple[int, list[Sequence[common.Prompt]]]]:
    """Questions of every level's turns: the more, the more clients ask."""
    weights = np.maximum(levels, FEW_CLIENTS)
    ends = (np.cumsum(weights) / weights.sum() * len(prompts)).astype(int)
    shares = []
    for concurrency, begin, end in zip(levels, [0, *ends], ends, strict=False):
        cuts = np.linspace(begin, end, num_turns + 1).astype(int)
        turns = [prompts[a:b] for a, b in itertools.pairwise(cuts)]
        if not all(turns):
            raise ValuSpecError(f"{len(prompts)} questions are too few for {len(levels)} levels")
        shares.append((concurrency, turns))
    return shares


def _model_of(url: str) -> str:
    """The model a server serves, by the name it wants to hear."""
    response = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status()
    name: str = response.json()["data"][0]["id"]
    return name


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        levels = _measure(args)
    except (ValuSpecError, httpx.HTTPError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    results = {concurrency: level.to_json() for concurrency, level in levels.items()}
    common.print_table(
        ("clients", "plain tok/s", "spec. tok/s", "ratio", "identical", "failures",
         "ttft p50/p95 plain", "spec.", "itl p50/p95 plain", "spec.", "peer tok/s"),
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


def _measure(args: argparse.Namespace) -> dict[int, Level]:
    if args.engine:
        return in_process(args)
    if args.url is not None:
        return asyncio.run(over_http(args, args.url))
    batch = str(max(args.concurrency))
    options = ["--model", args.model, "--dtype", args.dtype, "--max-batch-size", batch]
    if args.thresholds is not None:
        options += ["--threshold-file", str(args.thresholds.absolute())]
    with own_app(*options) as app:
        return asyncio.run(over_http(args, app.url))


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
        r.get("peer_tok_s", "-"),
    )


def _span(latency: dict[str, float], name: str) -> str:
    return f"{latency[name + '_p50_ms']:.0f}/{latency[name + '_p95_ms']:.0f}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--test", type=Path, nargs="+", required=True, help="questions to measure with"
    )
    parser.add_argument("--history", type=Path, required=True, help="questions answered before")
    parser.add_argument(
        "--concurrency",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1, 2, 4, 8, 16],
        help="clients, comma separated (1,2,4,8,16)",
    )
    parser.add_argument("--requests", type=int, help="ask the first N questions")
    parser.add_argument("--history-limit", type=int, help="learn from the first N of the history")
    parser.add_argument("--turns", type=int, default=2, help="turns of each system at each level")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a running app (one is started when absent)")
    where.add_argument("--engine", action="store_true", help="an engine in this process")
    parser.add_argument("--peer-url", help="another server to take turns with the app")
    parser.add_argument("--thresholds", type=Path, help="set to use (the shipped one)")
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--trees", type=int, default=16, help="draft trees retrieved per request")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
