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

A line of FILE is {"turns": [...]}, {"messages": [...]} or {"prompt": "..."}; "id" is optional.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from bench.recorder import Output, Recorder, RecordingTarget
from valuspec.drafting.drafter import Drafter
from valuspec.engine.engine import Engine
from valuspec.engine.proposal import Filter, keep_by_value
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, SamplingParams
from valuspec.errors import RequestError, ValuSpecError
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

MAX_BATCH_SIZE = 8
ROUND = " again "
"""Separates a prompt's id from the number of times it was asked before."""


@dataclass(slots=True)
class Tally:
    """Agreement of one mode with plain decoding."""

    requests: int = 0
    identical: int = 0
    tokens: int = 0
    logit_rows_checked: int = 0
    logit_rows_equal: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    batch_sizes: set[int] = field(default_factory=set)
    differing: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return (
            self.requests > 0
            and self.identical == self.requests
            and self.logit_rows_equal == self.logit_rows_checked
        )

    def compare(self, request_id: str, plain: Output, speculative: Output) -> None:
        """Rows of logits are compared as far as their contexts agree."""
        self.requests += 1
        self.tokens += len(speculative.token_ids)
        same = (plain.token_ids, plain.text, plain.finish_reason) == (
            speculative.token_ids, speculative.text, speculative.finish_reason,
        )  # fmt: skip
        self.identical += same
        if not same:
            self.differing.append(request_id)
        pairs = zip(plain.token_ids, speculative.token_ids, strict=False)
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        end = None if agreed is None else agreed + 1
        rows = list(zip(plain.digests[:end], speculative.digests[:end], strict=False))
        self.logit_rows_checked += len(rows)
        self.logit_rows_equal += sum(a == b for a, b in rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "identical": self.identical,
            "tokens": self.tokens,
            "logit_rows_checked": self.logit_rows_checked,
            "logit_rows_equal": self.logit_rows_equal,
            "exact": self.exact,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "batch_sizes": sorted(self.batch_sizes - {0}),
            "differing": self.differing[:16],
        }


class IdentityCheck:
    """Plain outputs of some prompts, and their comparison with every mode's."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[common.Prompt],
        params: SamplingParams,
        *,
        seed: int = 0,
    ) -> None:
        self.target = target
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
        return {
            "cold": self.cold,
            "warm": self.warm,
            "truth": lambda: self.adversarial("truth", hidden_truth),
            "random": lambda: self.adversarial("random", random_trees),
            "wrong": lambda: self.adversarial("wrong", wrong_trees),
            "mixed": self.mixed,
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

    def mixed(self) -> Tally:
        """Requests join whenever fewer than a changing number of them run.

        Few prompts are asked several times, so that batches can fill.
        """
        tally = Tally()
        rng = np.random.default_rng(self.seed)
        scripted = self._scripted(hidden_truth, random_trees, wrong_trees)
        drafter = EitherDrafter((scripted, self._stocked()), self.seed)
        recorder = self._recorder(drafter, MAX_BATCH_SIZE, keep_all)
        rounds = -(-2 * MAX_BATCH_SIZE // len(self.prompts))
        waiting = [
            replace(prompt, request_id=f"{prompt.request_id}{ROUND}{i}")
            for i in range(rounds)
            for prompt in self.prompts
        ]
        rng.shuffle(waiting)
        engine, wanted = recorder.engine, MAX_BATCH_SIZE
        with tqdm(total=len(waiting), **self._bar("mixed")) as bar:
            while waiting or engine.has_work:
                while waiting and engine.num_running + engine.num_waiting < wanted:
                    plain = rng.random() < 0.2
                    recorder.add(self._request(waiting.pop(), speculative=not plain))
                num_finished = self._step(tally, recorder)
                bar.update(num_finished)
                if num_finished or rng.random() < 0.1:
                    wanted = int(rng.integers(1, MAX_BATCH_SIZE + 1))
        return tally

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
        ended = 0
        for step in steps:
            if step.stats is not None:
                ended += 1
                tally.draft_tokens += step.stats.num_draft_tokens
                tally.accepted_tokens += step.stats.num_accepted_tokens
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
    ) -> Recorder:
        target: Any = RecordingTarget(self.target)
        engine = Engine(
            target,
            drafter=drafter,
            thresholds=self.thresholds,
            max_batch_size=max_batch_size,
            node_filter=node_filter,
            reuse_prefixes=reuse_prefixes,
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


def read_prompts(path: Path, target: Target, limit: int | None) -> list[common.Prompt]:
    """Requests of a JSON-lines file; raises ValuSpecError naming the line that cannot be read."""
    prompts: list[common.Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValuSpecError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token_ids = _token_ids(json.loads(line), target)
        except (ValueError, TypeError, KeyError, ValuSpecError) as error:
            raise ValuSpecError(f"{path}, line {number}: {error}") from error
        prompts.append(common.Prompt(f"line {number}", tuple(token_ids)))
        if len(prompts) == limit:
            break
    if not prompts:
        raise ValuSpecError(f"{path} has no requests")
    return prompts


def _token_ids(record: Any, target: Target) -> list[int]:
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str) and record["prompt"]:
            return target.encode(record["prompt"])
        if isinstance(record.get("messages"), list) and record["messages"]:
            return target.render_chat(record["messages"])
        turns = record.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return target.render_chat([{"role": "user", "content": turns[0]}])
    raise ValuSpecError(
        'expected {"turns": [TEXT, ...]}, {"messages": [{"role": .., "content": ..}]} '
        'or {"prompt": TEXT}'
    )


def run(check: IdentityCheck) -> dict[str, Tally]:
    """Run all modes and print their table."""
    tallies = {name: mode() for name, mode in check.modes().items()}
    common.print_table(
        ("mode", "requests", "identical", "tokens", "rows checked", "rows equal", "drafted",
         "accepted", "batch sizes"),
        [
            (name, t.requests, t.identical, t.tokens, t.logit_rows_checked, t.logit_rows_equal,
             t.draft_tokens, t.accepted_tokens, _span(t.batch_sizes - {0}))
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
        check = IdentityCheck(target, prompts, params, seed=args.seed)
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
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
