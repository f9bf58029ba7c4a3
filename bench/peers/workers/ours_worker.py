"""This project's engine: with its own drafts, with parts of it left out, with others' drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from serve import Request, serve

from bench.peers.sources import token_recycling
from bench.peers.sources.rest import RestDrafter
from bench.peers.sources.session import PeerDrafter, everything
from jobs.history import SimulatedRetrieval
from valuspec.calibration import calibrate
from valuspec.drafting.drafter import Drafter
from valuspec.engine.engine import Engine
from valuspec.engine.measure import measure_cost
from valuspec.engine.proposal import Filter, keep_by_value
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, SamplingParams
from valuspec.errors import ThresholdError
from valuspec.evidence import CandidateTree
from valuspec.replay import Trajectory
from valuspec.thresholds import ThresholdSet
from valuspec.valuation import keep, values

NAMESPACE = "peers"
TREES = 16
"""Draft trees retrieved per request."""
FIXED_TAU = 0.1
SHARED_TOKENS = 1 << 17


def keep_above_fixed_tau(
    candidates: Sequence[CandidateTree],
    thresholds: Sequence[ThresholdSet],
    batch_size: int,
    max_nodes: int,
) -> list[Any]:
    """All nodes worth a fixed tau, whatever they cost."""
    return [
        np.flatnonzero(values(c, t) >= FIXED_TAU).astype(np.int32)
        for c, t in zip(candidates, thresholds, strict=True)
    ]


def keep_as_if_alone(
    candidates: Sequence[CandidateTree],
    thresholds: Sequence[ThresholdSet],
    batch_size: int,
    max_nodes: int,
) -> list[Any]:
    """Each request keeps what would pay if it had the machine to itself: no common budget."""
    return [
        keep(c, t, batch_size=1, max_nodes=max_nodes // len(candidates))
        for c, t in zip(candidates, thresholds, strict=True)
    ]


FILTERS: dict[str, Filter] = {
    "unfiltered": everything,
    "fixed-tau": keep_above_fixed_tau,
    "no-budget": keep_as_if_alone,
}
"""What the modes keep; those not named value their nodes, a peer's source is never valued."""


class Ours:
    def load(self, model: str, threads: int, max_streams: int = 8) -> dict[str, str]:
        torch.set_num_threads(threads)
        self._target = Target.load(model)
        self._max_streams = max_streams
        self._costs = {n: measure_cost(self._target, batch_size=n) for n in (1, max_streams)}
        self._requests = 0
        self.history([], [])
        return {"torch": torch.__version__, "arithmetic": self._target.exact_mode}

    def history(self, earlier: list[Request], calibration: list[Request]) -> None:
        self._earlier, self._calibration = (
            [
                Trajectory(np.array(p, np.int32), np.array(o, np.int32), len(o), (), NAMESPACE)
                for p, o in requests
                if o
            ]
            for requests in (earlier, calibration)
        )
        self._thresholds: dict[int, ThresholdSet] = {}
        self._indexes: dict[int, SimulatedRetrieval] = {}
        self._successors: list[list[list[int]]] = []

    def stock(self, count: int, mode: str = "filtered", **source: Any) -> str:
        earlier = self._earlier[:count]
        drafter = self._drafter(mode, earlier, source)
        target: Any = self._target
        if isinstance(drafter, token_recycling.RecyclingDrafter):
            target = token_recycling.WatchedTarget(target, drafter)
        peer = isinstance(drafter, PeerDrafter)
        self._room = (
            token_recycling.room_for_its_tree if target is not self._target else nullcontext
        )
        self._index = None if peer or mode == "no-retrieval" else self._retrieval(count)
        self._speculative = mode != "plain"
        with self._room():
            self._engine = Engine(
                target,
                drafter=drafter,
                thresholds=self._threshold_set(0 if peer or mode == "plain" else count),
                max_batch_size=self._max_streams,
                node_filter=everything if peer else FILTERS.get(mode, keep_by_value),
                kv_tokens=self._max_streams * 4096,
                reuse_prefixes=False,  # prompts come again in other passes
            )
        if mode == "token-recycling":
            return "prompts and answers of finished requests read by the target, as decoding does"
        return "finished requests put into its stores"

    def generate(
        self,
        prompts: list[list[int]],
        streams: int,
        max_tokens: int,
        stop_ids: list[int],
        **options: Any,
    ) -> tuple[list[list[int]], dict[str, int]]:
        """The options are those `stock` was given; stops are the target's own."""
        with self._room():
            return self._generate(prompts, SamplingParams(
                max_tokens=max_tokens, speculative=self._speculative
            ))  # fmt: skip

    def _generate(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> tuple[list[list[int]], dict[str, int]]:
        outputs: dict[str, list[int]] = {}
        drafted = accepted = 0
        for prompt in prompts:
            self._requests += 1
            name = str(self._requests)
            outputs[name] = []
            self._engine.add(
                GenerationRequest(
                    request_id=name, prompt_ids=tuple(prompt), params=params, namespace=NAMESPACE
                )
            )
            if self._speculative and self._index is not None:
                query = _trajectory(prompt)
                self._engine.attach_retrieved(name, self._index.lookup(query, TREES))
        while self._engine.has_work:
            for step in self._engine.step():
                outputs[step.request_id] += step.token_ids
                if step.stats is not None:
                    drafted += step.stats.num_draft_tokens
                    accepted += step.stats.num_accepted_tokens
        if errors := self._engine.counters["draft_errors"]:
            raise RuntimeError(f"drafting failed {errors} times; the engine goes on without")
        return list(outputs.values()), {"drafted": drafted, "accepted": accepted}

    def _drafter(self, mode: str, earlier: list[Trajectory], source: dict[str, Any]) -> Drafter:
        if mode == "rest":
            rest = RestDrafter(**source)
            rest.stock(earlier)
            return rest
        if mode == "token-recycling":
            recycling = token_recycling.RecyclingDrafter(self._target)
            for answer in earlier[len(self._successors) :]:
                self._successors.append(token_recycling.successors(self._target, answer))
            recycling.learn(zip(earlier, self._successors, strict=False))
            return recycling
        if mode == "suffix":
            # Of another environment's library, which the worker may not have.
            from bench.peers.sources.suffix_decoding import SuffixDrafter

            suffix = SuffixDrafter(**source)
            suffix.stock(earlier)
            return suffix
        drafter = Drafter(shared_tokens=SHARED_TOKENS)
        for t in () if mode == "no-shared-store" else earlier:
            drafter.remember(t.namespace, t.prompt_ids, t.output_ids)
        return drafter

    def _retrieval(self, count: int) -> SimulatedRetrieval:
        if count not in self._indexes:
            index = SimulatedRetrieval(vocab_size=self._target.vocab_size)
            for answer in self._earlier[:count]:
                index.add(answer)
            self._indexes[count] = index
        return self._indexes[count]

    def _threshold_set(self, count: int) -> ThresholdSet:
        """Calibrated with so many earlier requests; the shipped set where that cannot be done."""
        if count not in self._thresholds:
            found = ThresholdSet.starting(self._target.model_fingerprint)
            if count:
                with suppress(ThresholdError):  # too few answers to learn from
                    found = self._calibrate(count)
            self._thresholds[count] = found
        return self._thresholds[count]

    def _calibrate(self, count: int) -> ThresholdSet:
        index = self._retrieval(count)
        return calibrate(
            [
                replace(answer, retrieved=tuple(index.lookup(answer, TREES)))
                for answer in self._calibration
            ],
            self._drafter("filtered", self._earlier[:count], {}),
            self._costs,
            model_fingerprint=self._target.model_fingerprint,
            provenance={"made_by": "bench.peers"},
        )


def _trajectory(prompt: list[int]) -> Trajectory:
    return Trajectory(np.array(prompt, np.int32), np.empty(0, np.int32), 1, (), NAMESPACE)


if __name__ == "__main__":
    serve(Ours())
