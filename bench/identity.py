"""Does speculation change anything? Every request, every mode, token by token and bit by bit.

    python -m bench.identity --requests FILE.jsonl [--limit N] [--max-tokens 160]

The reference is plain decoding, one request at a time. Each mode must give the same token ids,
and the logits each output token was chosen from must have the same bits:

    cold     the real drafter, its shared store empty, for each request alone
    warm     the store holds the answers of all requests, and the retrieved tree its own
    truth    every tree hides a part of the right continuation among random nodes
    random   random trees, all nodes verified
    wrong    the right continuation under wrong first tokens: everything must be rejected
    mixed    one engine of 8 places; requests of all these kinds and plain ones join at random,
             as another batch size from 1 to 8 is drawn
    crowded  the same with a cache too small for them: the youngest are preempted again and again
    head     the trees of a draft head (with `--draft-head`), all nodes verified
    hybrid   the same merged with what occurred before, in an engine and a cache as in `crowded`

In batches, prompts are computed in chunks while others decode.

A line of FILE is {"turns": [...]}, {"messages": [...]} or {"prompt": "..."}.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench import common
from bench.adversary import (
    Adversary,
    EitherDrafter,
    ScriptedDrafter,
    hidden_truth,
    keep_all,
    random_trees,
    wrong_trees,
)
from bench.recorder import Recorder, RecordingTarget
from bench.request_files import read_prompts
from bench.tally import Tally
from valuspec.drafting.drafter import Drafter
from valuspec.eagle3.tree import TreeShape
from valuspec.engine.engine import Engine
from valuspec.engine.head_source import Draft, HeadChoice
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.proposal import MAX_TREE_NODES, Filter, keep_by_value
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, SamplingParams
from valuspec.errors import RequestError, ValuSpecError
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

MAX_BATCH_SIZE = 8
#: Of a crowded cache, beyond what one request needs.
SPARE_BLOCKS = 4
#: Deeper and wider than pays: more places for a mistake.
HEAD_SHAPE = TreeShape(top_k=6, depth=3, total_tokens=40)
ROUND = " again "
"""Separates a prompt's id from the number of times it was asked before."""


class IdentityCheck:
    """Plain outputs of some prompts, and their comparison with every mode's."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[common.Prompt],
        params: SamplingParams,
        *,
        seed: int = 0,
        head: Path | None = None,
    ) -> None:
        self.target = target
        self.head = head
        self.prompts = prompts
        self.params = params
        self.seed = seed
        self.thresholds = ThresholdSet.starting(target.model_fingerprint)
        plain = self._recorder(Drafter(), 1, reuse_prefixes=False)
        for prompt in self._progress("plain"):
            try:
                plain.add(self._request(prompt, speculative=False))
            except RequestError as error:
                raise ValuSpecError(f"{prompt.request_id}: {error}") from error
            while plain.engine.has_work:
                plain.step()
        self.plain = plain.outputs

    def modes(self) -> dict[str, Callable[[], Tally]]:
        heads = {"head": self.head_alone, "hybrid": self.hybrid} if self.head is not None else {}
        return {
            "cold": self.cold,
            "warm": self.warm,
            "truth": lambda: self.adversarial("truth", hidden_truth),
            "random": lambda: self.adversarial("random", random_trees),
            "wrong": lambda: self.adversarial("wrong", wrong_trees),
            "mixed": lambda: self.mixed("mixed"),
            "crowded": lambda: self.mixed("crowded", kv_tokens=self._few_tokens()),
            **heads,
        }

    def cold(self) -> Tally:
        tally = Tally()
        for prompt in self._progress("cold"):
            self._alone(tally, prompt, self._recorder(Drafter(), 1))
        return tally

    def warm(self) -> Tally:
        tally = Tally()
        drafter = self._stocked()
        for prompt in self._progress("warm"):
            trees = [DraftTree.from_paths([self.plain[prompt.request_id].token_ids])]
            self._alone(tally, prompt, self._recorder(drafter, 1), trees)
        return tally

    def adversarial(self, name: str, *adversaries: Adversary) -> Tally:
        tally = Tally()
        recorder = self._recorder(self._scripted(*adversaries), 1, keep_all)
        for prompt in self._progress(name):
            self._alone(tally, prompt, recorder)
        return tally

    def head_alone(self) -> Tally:
        tally = Tally()
        recorder = self._recorder(Drafter(), 1, keep_all, head=self._choice("eagle3"))
        for prompt in self._progress("head"):
            self._alone(tally, prompt, recorder)
        return tally

    def hybrid(self) -> Tally:
        few, choice = self._few_tokens(), self._choice("hybrid")
        return self._together(
            "hybrid",
            self._recorder(self._stocked(), MAX_BATCH_SIZE, keep_all, kv_tokens=few, head=choice),
        )

    def mixed(self, name: str, *, kv_tokens: int | None = None) -> Tally:
        scripted = self._scripted(hidden_truth, random_trees, wrong_trees)
        drafter = EitherDrafter((scripted, self._stocked()), self.seed)
        return self._together(
            name, self._recorder(drafter, MAX_BATCH_SIZE, keep_all, kv_tokens=kv_tokens)
        )

    def _together(self, name: str, recorder: Recorder) -> Tally:
        """Requests join whenever fewer than a changing number of them run.

        Few prompts are asked several times, so that batches can fill.
        """
        tally = Tally()
        rng = np.random.default_rng(self.seed)
        rounds = -(-2 * MAX_BATCH_SIZE // len(self.prompts))
        waiting = [
            replace(prompt, request_id=f"{prompt.request_id}{ROUND}{i}")
            for i in range(rounds)
            for prompt in self.prompts
        ]
        rng.shuffle(waiting)
        engine, wanted = recorder.engine, MAX_BATCH_SIZE
        with tqdm(total=len(waiting), **self._bar(name)) as bar:
            while waiting or engine.has_work:
                while waiting and engine.num_running + engine.num_waiting < wanted:
                    plain = rng.random() < 0.2
                    recorder.add(self._request(waiting.pop(), speculative=not plain))
                num_finished = self._step(tally, recorder)
                bar.update(num_finished)
                if num_finished or rng.random() < 0.1:
                    wanted = int(rng.integers(1, MAX_BATCH_SIZE + 1))
        return tally

    def _few_tokens(self) -> int:
        """Room for the largest request, and a few blocks more."""
        longest = max(len(p.token_ids) for p in self.prompts) + self.params.max_tokens
        return (-(-(longest + 1 + MAX_TREE_NODES) // BLOCK) + SPARE_BLOCKS) * BLOCK

    def _choice(self, draft: Draft) -> HeadChoice:
        assert self.head is not None
        return HeadChoice(self.target.load_head(self.head), draft, HEAD_SHAPE, always=True)

    def _alone(
        self,
        tally: Tally,
        prompt: common.Prompt,
        recorder: Recorder,
        trees: Sequence[DraftTree] = (),
    ) -> None:
        recorder.add(self._request(prompt, speculative=True), trees)
        while recorder.engine.has_work:
            self._step(tally, recorder)

    def _step(self, tally: Tally, recorder: Recorder) -> int:
        """Run one step and compare the requests that end with it; return how many did."""
        steps = recorder.step()
        tally.batch_sizes.add(len(steps))
        tally.mixed_steps += {v.every_row for v in recorder.target.verified} == {True, False}
        ended = 0
        for step in steps:
            if step.stats is not None:
                ended += 1
                tally.draft_tokens += step.stats.num_draft_tokens
                tally.accepted_tokens += step.stats.num_accepted_tokens
                tally.preemptions += step.stats.num_preemptions
                output = recorder.outputs[step.request_id]
                plain = self.plain[step.request_id.split(ROUND)[0]]
                tally.compare(step.request_id, plain, output)
        return ended

    def _request(self, prompt: common.Prompt, *, speculative: bool) -> GenerationRequest:
        return GenerationRequest(
            request_id=prompt.request_id,
            prompt_ids=prompt.token_ids,
            params=replace(self.params, speculative=speculative),
            namespace=common.NAMESPACE,
        )

    def _recorder(
        self,
        drafter: Drafter,
        max_batch_size: int,
        node_filter: Filter = keep_by_value,
        *,
        reuse_prefixes: bool = True,
        kv_tokens: int | None = None,
        head: HeadChoice | None = None,
    ) -> Recorder:
        target: Any = RecordingTarget(self.target)
        engine = Engine(
            target,
            drafter=drafter,
            thresholds=self.thresholds,
            max_batch_size=max_batch_size,
            node_filter=node_filter,
            reuse_prefixes=reuse_prefixes,
            kv_tokens=kv_tokens,
            head=head,
        )
        return Recorder(engine, target)

    def _stocked(self) -> Drafter:
        drafter = Drafter()
        for prompt in self.prompts:
            output = self.plain[prompt.request_id].token_ids
            drafter.remember(common.NAMESPACE, prompt.token_ids, output)
        return drafter

    def _scripted(self, *adversaries: Adversary) -> Drafter:
        futures = {p.token_ids: self.plain[p.request_id].token_ids for p in self.prompts}
        return ScriptedDrafter(adversaries, self.target.vocab_size, futures, self.seed)

    def _progress(self, name: str) -> Any:
        return tqdm(self.prompts, **self._bar(name))

    def _bar(self, name: str) -> dict[str, Any]:
        return {"desc": name, "unit": "request", "file": sys.stderr, "mininterval": 5}


def run(check: IdentityCheck) -> dict[str, Tally]:
    """Run all modes and print their table."""
    tallies = {name: mode() for name, mode in check.modes().items()}
    common.print_table(
        ("mode", "requests", "identical", "tokens", "rows checked", "rows equal", "drafted",
         "accepted", "batch sizes", "mixed steps", "preempted"),
        [
            (name, t.requests, t.identical, t.tokens, t.logit_rows_checked, t.logit_rows_equal,
             t.draft_tokens, t.accepted_tokens, _span(t.batch_sizes - {0}),
             t.mixed_steps, t.preemptions)
            for name, t in tallies.items()
        ],
    )  # fmt: skip
    return tallies


def _span(sizes: set[int]) -> str:
    return f"{min(sizes)}-{max(sizes)}" if sizes else "-"


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    started = time.perf_counter()
    try:
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
        )
        target = Target.load(args.model, dtype=args.dtype)
        prompts = read_prompts(args.requests, target, args.limit)
        if args.draft_head is not None:
            target.load_head(args.draft_head)  # fail before the work
        check = IdentityCheck(target, prompts, params, seed=args.seed, head=args.draft_head)
    except ValuSpecError as error:
        print(f"identity: {error}", file=sys.stderr)
        return 2
    tallies = run(check)
    counts = ("requests", "identical", "tokens", "logit_rows_checked", "logit_rows_equal")
    exact = all(tally.exact for tally in tallies.values())
    common.print_json(
        {
            **{name: sum(getattr(t, name) for t in tallies.values()) for name in counts},
            "exact": exact,
            "exact_mode": target.exact_mode,
            "prompts": len(prompts),
            "modes": {name: tally.to_json() for name, tally in tallies.items()},
            "seconds": time.perf_counter() - started,
            "settings": {name: str(value) for name, value in vars(args).items()},
            "environment": common.environment(),
        }
    )
    return 0 if exact else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.identity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=Path, required=True, help="JSON-lines file")
    parser.add_argument("--limit", type=_positive, help="use the first N requests")
    parser.add_argument("--max-tokens", type=_positive, default=160)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the adversaries")
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-head", type=Path, help="check the trees of this head as well")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
