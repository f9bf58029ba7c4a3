"""`bench.speed --streams N`: the modes at several requests at a time, in one engine.

Every mode decodes all test requests in turn, a new one whenever a place becomes free, and must
give the tokens that plain decoding one at a time would. Speeds are of everything: all tokens over
the time from the first step to the last, prompts included, which the modes have in common.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench import common
from bench.workload import Workload, prepare
from valuspec.engine.engine import Engine
from valuspec.engine.measure import measure_costs
from valuspec.engine.proposal import Filter, Proposer, keep_by_value
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, RequestStats, SamplingParams
from valuspec.evidence import CandidateTree
from valuspec.replay import Select

COST_BUDGET_S = 60.0
ROUNDS = 3
"""How often every mode decodes everything; the medians count."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one mode did in one round."""

    outputs: dict[str, list[int]]
    stats: list[RequestStats]
    seconds: float

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.outputs.values())) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of a request in a step it took part in."""
        steps = sum(s.num_steps for s in self.stats)
        return 1 + sum(s.num_accepted_tokens for s in self.stats) / max(1, steps)

    @property
    def nodes_per_step(self) -> float:
        steps = sum(s.num_steps for s in self.stats)
        return sum(s.num_draft_tokens for s in self.stats) / max(1, steps)


def measure(args: argparse.Namespace, target: Target) -> int:
    """Print the table and the JSON line; 1 where any output differs."""
    costs = measure_costs(target, args.streams, budget_s=COST_BUDGET_S).costs
    workload = prepare(args, target, costs, args.streams)
    engines = workload.engines(target, costs)
    names = list(workload.selects)
    known = _decode(engines["plain"], workload, "plain", {}).outputs
    passes: dict[str, list[Pass]] = {name: [] for name in names}
    with tqdm(total=ROUNDS * len(names), unit="pass", file=sys.stderr) as bar:
        for turn in range(ROUNDS):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                bar.set_description(name)
                passes[name].append(_decode(engines[name], workload, name, known))
                bar.update()
    tok_s = {name: float(np.median([p.tok_s for p in some])) for name, some in passes.items()}
    speedup = {name: speed / tok_s["plain"] for name, speed in tok_s.items()}
    compared = [p.outputs[r] == known[r] for some in passes.values() for p in some for r in known]
    _print(passes, tok_s)
    common.print_json(
        {
            "streams": args.streams,
            "requests": len(known),
            "identical": sum(compared),
            "compared": len(compared),
            "plain_tok_s": tok_s["plain"],
            "speedup": speedup,
            "tokens_per_step": {n: some[-1].tokens_per_step for n, some in passes.items()},
            "nodes_per_step": {n: some[-1].nodes_per_step for n, some in passes.items()},
            "filtered_over_fixed": speedup["filtered"] / speedup["frequency"],
            "oracle_share": speedup["filtered"] / speedup["oracle"],
            "costs": {size: cost.to_json() for size, cost in costs.items()},
            "threshold_version": workload.thresholds["filtered"].version,
            "settings": {k: str(v) for k, v in vars(args).items()},
            "environment": common.environment(),
        }
    )
    return 0 if all(compared) else 1


def _decode(engine: Engine, workload: Workload, mode: str, known: dict[str, list[int]]) -> Pass:
    """Decode all test requests in one mode; what they will say is known to the oracle alone."""
    outputs: dict[str, list[int]] = {prompt.request_id: [] for prompt in workload.prompts}
    engine.node_filter = keep_by_value
    if mode in ("unfiltered", "frequency", "oracle"):
        engine.node_filter = _each(workload.selects[mode], _owners(engine), outputs, known)
    if engine.head_source is not None:
        engine.head_source.always = mode != "filtered"
    params = SamplingParams(max_tokens=workload.tests[0].max_tokens, speculative=mode != "plain")
    for prompt, test in zip(workload.prompts, workload.tests, strict=True):
        engine.add(
            GenerationRequest(
                request_id=prompt.request_id,
                prompt_ids=prompt.token_ids,
                params=params,
                namespace=common.NAMESPACE,
            )
        )
        engine.attach_retrieved(prompt.request_id, test.retrieved)
    stats = []
    started = time.perf_counter()
    while engine.has_work:
        for step in engine.step():
            outputs[step.request_id] += step.token_ids
            if step.stats is not None:
                stats.append(step.stats)
    return Pass(outputs, stats, time.perf_counter() - started)


def _owners(engine: Engine) -> list[str]:
    """Requests whose candidates a filter is shown, as it is shown them."""
    owners: list[str] = []
    cut = Proposer._cut.__get__(engine._proposer)

    def listen(sequences: Any, drafted: Any, *others: Any) -> None:
        owners[:] = [sequences[i].request.request_id for i, _ in drafted]
        cut(sequences, drafted, *others)

    engine._proposer._cut = listen  # type: ignore[assignment,method-assign]
    return owners


def _each(
    select: Select, owners: list[str], outputs: dict[str, list[int]], known: dict[str, list[int]]
) -> Filter:
    """What is kept of each request's candidates by themselves, as far as there are rows."""

    def keep(
        candidates: Sequence[CandidateTree], _: object, batch_size: int, max_nodes: int
    ) -> list[NDArray[np.int32]]:
        kept, left = [], max_nodes
        for candidate, owner in zip(candidates, owners, strict=True):
            future = np.array(known[owner][len(outputs[owner]) :], np.int32)
            kept.append(select(candidate, future)[:left])
            left -= len(kept[-1])
        return kept

    return keep


def _print(passes: dict[str, list[Pass]], tok_s: dict[str, float]) -> None:
    rows: Sequence[tuple[object, ...]] = [
        (name, tok_s[name], tok_s[name] / tok_s["plain"], some[-1].tokens_per_step,
         some[-1].nodes_per_step)
        for name, some in passes.items()
    ]  # fmt: skip
    common.print_table(("mode", "tok/s", "speedup", "tokens/step", "nodes"), rows)
