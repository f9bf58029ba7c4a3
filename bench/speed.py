"""How much faster is the filtered tree? One process, the same engine on both sides.

    python -m bench.speed --history H.jsonl --calibration C.jsonl --test T.jsonl [--limit N]
                          [--draft retrieval|eagle3|hybrid] [--streams N]

History answers fill the shared store and the retrieval index and then stay as they are. Transfer
rates and thresholds come from the calibration answers. Every test request is decoded in every
mode in turn, the order rotating from request to request, and every mode must give the tokens that
plain decoding gives. Speeds are of decoding: tokens after the first, over the time of the steps.
(`--streams`: see `bench.streams`.)

    plain       one token a step
    unfiltered  all candidate nodes, 64 at most
    frequency   as many of the most frequent nodes as were best on the calibration answers; with
                a draft head, of the likeliest
    filtered    the nodes valuation keeps
    retrieval   with a draft head: the same without it
    oracle      the nodes the target will accept: no filter of these candidates can do better
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tqdm import tqdm

from bench import common, streams
from bench.workload import add_arguments, prepare
from valuspec import replay
from valuspec.calibration import reliability, score
from valuspec.drafted import Drafted
from valuspec.engine.engine import Engine
from valuspec.engine.measure import measure_cost
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, RequestStats, SamplingParams
from valuspec.engine.weights import load_model
from valuspec.replay import Select, Trajectory

COST_REPEATS = 11
"""Turns of measuring the verify cost: thresholds are made with it."""
GENERATE_REQUESTS = 8
"""Test requests also decoded by transformers' own `generate`."""


@dataclass
class Measured:
    """One mode's figures, summed over the test requests."""

    stats: list[RequestStats] = field(default_factory=list)

    def add(self, stats: RequestStats) -> None:
        self.stats.append(stats)

    def total(self, name: str) -> float:
        return float(sum(getattr(s, name) for s in self.stats))

    @property
    def tok_s(self) -> float:
        return (self.total("num_output_tokens") - len(self.stats)) / self.total("decode_s")

    @property
    def request_tok_s(self) -> float:
        """With prefill."""
        return self.total("num_output_tokens") / (self.total("decode_s") + self.total("prefill_s"))

    @property
    def acceptance_length(self) -> float:
        return 1 + self.total("num_accepted_tokens") / max(1.0, self.total("num_steps"))

    @property
    def nodes_per_step(self) -> float:
        return self.total("num_draft_tokens") / max(1.0, self.total("num_steps"))

    def ms_per_step(self, part: str) -> float:
        return 1e3 * self.total(part) / max(1.0, self.total("num_steps"))

    @property
    def other_ms(self) -> float:
        parts = ("forward_s", "draft_s", "valuation_s")
        return self.ms_per_step("decode_s") - sum(self.ms_per_step(p) for p in parts)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    target = Target.load(args.model, dtype=args.dtype)
    if args.streams > 1:
        return streams.measure(args, target)
    cost = measure_cost(target, repeats=COST_REPEATS)
    workload = prepare(args, target, {1: cost})
    thresholds, selects = workload.thresholds["filtered"], workload.selects
    engines = workload.engines(target, {1: cost})
    engine = engines["filtered"]
    measured = {name: Measured() for name in selects}
    tests: list[Trajectory] = []
    differing = 0
    bar = tqdm(workload.prompts, unit="request", file=sys.stderr)
    for turn, (prompt, test) in enumerate(zip(bar, workload.tests, strict=True)):
        output, stats = _decode(engine, prompt, test, None)
        if len(output) < 2:
            continue
        measured["plain"].add(stats)
        test = replace(test, output_ids=np.array(output, np.int32))
        tests.append(test)
        names = [name for name in selects if name != "plain"]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if engine.head_source is not None:
                engine.head_source.always = name != "filtered"
            drafted, stats = _decode(engines[name], prompt, test, selects[name])
            measured[name].add(stats)
            differing += drafted != output
    assert engine.live_costs is not None
    live = engine.live_costs.current()[1]  # as a replica knows them: measured, then held to steps
    if (head := workload.head) is None:
        replayed = {n: replay.replay(tests, workload.drafter, s, live) for n, s in selects.items()}
        quality = reliability(tests, workload.drafter, thresholds)
    else:
        offered = head.offers(tests)
        replayed = {n: head.tally(offered, s, live, plain=n == "plain") for n, s in selects.items()}
        without = replay.replay(tests, workload.drafter, selects["retrieval"], live)
        replayed["retrieval"] = without
        drafted_tests = Drafted.of_offers(offered)
        quality = score(*drafted_tests.outcomes(drafted_tests.walk(thresholds), thresholds))
    generate_tok_s, engine_tok_s = _transformers_generate(
        args.model, engine, workload.prompts[:GENERATE_REQUESTS], args.max_tokens
    )
    plain = measured["plain"].tok_s
    _print(measured, replayed)
    speedup = {name: m.tok_s / plain for name, m in measured.items()}
    predicted = replayed["filtered"].tok_s / replayed["plain"].tok_s
    common.print_json(
        {
            "requests": len(tests),
            "identical": len(tests) * (len(selects) - 1) - differing,
            "compared": len(tests) * (len(selects) - 1),
            "exact": target.exact,
            "plain_tok_s": plain,
            "speedup": speedup,
            "request_speedup": {
                name: m.request_tok_s / measured["plain"].request_tok_s
                for name, m in measured.items()
            },
            "mean_acceptance_length": {n: m.acceptance_length for n, m in measured.items()},
            "nodes_per_step": {n: m.nodes_per_step for n, m in measured.items()},
            "overhead_ms_per_step": {
                name: m.ms_per_step("decode_s") - m.ms_per_step("forward_s")
                for name, m in measured.items()
            },
            "filtered_over_unfiltered": speedup["filtered"] / speedup["unfiltered"],
            "oracle_share": speedup["filtered"] / speedup["oracle"],
            "replay_error": predicted / speedup["filtered"] - 1,
            "ece": quality.expected_calibration_error,
            "auc": quality.auc,
            "transformers_generate_tok_s": generate_tok_s,
            "plain_over_generate": engine_tok_s / generate_tok_s,
            "cost": cost.to_json(),
            "live_cost": live.to_json(),
            "threshold_version": thresholds.version,
            "settings": {k: str(v) for k, v in vars(args).items()},
            "environment": common.environment(),
        }
    )
    return 1 if differing else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.speed", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--streams", type=int, default=1, help="requests decoded at a time")
    return parser.parse_args(argv)


def _decode(
    engine: Engine, prompt: common.Prompt, test: Trajectory, select: Select | None
) -> tuple[list[int], RequestStats]:
    """Decode one request alone; `select` None is plain decoding."""
    output: list[int] = []
    if select is not None:
        chosen: Select = select
        engine.node_filter = lambda candidates, thresholds, batch_size, most: [
            chosen(candidates[0], test.output_ids[len(output) :])
        ]
    request = GenerationRequest(
        request_id=prompt.request_id,
        prompt_ids=prompt.token_ids,
        params=SamplingParams(max_tokens=test.max_tokens, speculative=select is not None),
        namespace=common.NAMESPACE,
    )
    engine.add(request)
    engine.attach_retrieved(prompt.request_id, test.retrieved)
    while True:
        for step in engine.step():
            output += step.token_ids
            if step.stats is not None:
                return output, step.stats


def _transformers_generate(
    model: str, engine: Engine, prompts: Sequence[common.Prompt], max_tokens: int
) -> tuple[float, float]:
    """Tokens per second, prefill included, of transformers `generate` and of this engine, plain.

    Over the same requests, taken in turn.
    """
    loaded, _ = load_model(model, engine.target.dtype)
    eos = sorted(engine.target.eos_token_ids)

    def generate(prompt: common.Prompt) -> int:
        ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode():
            out = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=eos,
                pad_token_id=eos[0],
            )
        return int(out.shape[1]) - len(prompt.token_ids)

    def ours(prompt: common.Prompt) -> int:
        done = common.generate(engine, [prompt], max_tokens, speculative=False)
        return len(done[prompt.request_id][0])

    tokens, seconds = {generate: 0, ours: 0}, {generate: 0.0, ours: 0.0}
    generate(prompts[0])  # warm-up
    for prompt in prompts:
        for run in (generate, ours):
            started = time.perf_counter()
            tokens[run] += run(prompt)
            seconds[run] += time.perf_counter() - started
    return tokens[generate] / seconds[generate], tokens[ours] / seconds[ours]


def _print(measured: dict[str, Measured], replayed: dict[str, replay.Tally]) -> None:
    plain = measured["plain"]
    rows = []
    for name, m in measured.items():
        rows.append(
            (
                name,
                m.tok_s,
                m.tok_s / plain.tok_s,
                statistics.median(
                    (b.decode_s / max(1, b.num_output_tokens - 1))
                    / (a.decode_s / max(1, a.num_output_tokens - 1))
                    for a, b in zip(m.stats, plain.stats, strict=True)
                ),
                replayed[name].tok_s / replayed["plain"].tok_s,
                m.request_tok_s / plain.request_tok_s,
                m.acceptance_length,
                m.nodes_per_step,
                m.ms_per_step("forward_s"),
                m.ms_per_step("draft_s"),
                m.ms_per_step("valuation_s"),
                m.other_ms,
            )
        )
    common.print_table(
        ("mode", "tok/s", "speedup", "median", "replayed", "+prefill", "accept. len", "nodes",
         "forward ms", "draft ms", "value ms", "other ms"),
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
