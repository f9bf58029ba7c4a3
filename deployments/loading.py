"""Loading the target model and its engine, and what a replica needs of the two."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deployments.engine_loop import SteppableEngine
from deployments.messages import Message
from deployments.settings import AppArgs
from valuspec.cost import LiveCosts
from valuspec.engine.types import GenerationRequest, SamplingParams
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

if TYPE_CHECKING:
    from valuspec.engine.mirror import Leader
    from valuspec.engine.ranks import RankGroup
    from valuspec.engine.target import Target as ValuSpecTarget


class Target(Protocol):
    """What a replica needs of `valuspec.engine.target.Target`."""

    max_model_len: int
    vocab_size: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    tokenizer: Any

    @property
    def exact(self) -> bool: ...
    @property
    def exact_mode(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...
    def render_chat(self, messages: list[Message]) -> list[int]: ...


class Engine(SteppableEngine, Protocol):
    """What a replica needs of `valuspec.engine.engine.Engine`."""

    thresholds: ThresholdSet
    live_costs: LiveCosts
    counters: Counter[str]

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    def validate(self, request: GenerationRequest) -> None: ...
    def remember(self, trees: Iterable[tuple[str, DraftTree]]) -> None: ...


def check_split(args: AppArgs) -> None:
    """Raise ModelError if the model cannot be split as asked; reads its configuration alone."""
    from valuspec.engine import shards
    from valuspec.engine.weights import load_config

    shards.check_split(load_config(args.model), args.tensor_parallel_size)


def load_target(
    args: AppArgs, *, group: RankGroup | None = None, leader: Leader | None = None
) -> ValuSpecTarget:
    """Load the target model, or one rank's shard of it, for this process's threads."""
    # Imported here: the graph is also built where no torch is needed.
    import torch

    from valuspec.engine.target import Target

    # Ray gives an actor OMP_NUM_THREADS=1 unless it reserves CPUs.
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(args.num_threads or max(1, cores // args.tensor_parallel_size))
    return Target.load(
        args.model,
        dtype=args.dtype,
        device=args.device,
        exact=args.exact and (group is None or group.rank == 0),  # which probes for all
        group=group,
        leader=leader,
    )


def load_engine(
    args: AppArgs, *, group: RankGroup | None = None, leader: Leader | None = None
) -> tuple[Target, Engine]:
    """Load the target model and an engine around it. Takes seconds to minutes.

    group, leader: where this process is rank 0 of several
    """
    from valuspec.drafting.drafter import Drafter
    from valuspec.eagle3.loading import SHIPPED_HEAD
    from valuspec.engine.cost_cache import live_costs
    from valuspec.engine.engine import Engine as ValuSpecEngine
    from valuspec.engine.head_source import HeadChoice

    target = load_target(args, group=group, leader=leader)
    thresholds = ThresholdSet.starting(target.model_fingerprint)
    head = None
    if args.draft != "retrieval":
        folder = SHIPPED_HEAD if args.draft_head is None else Path(args.draft_head)
        head = HeadChoice.on_cpu(target.load_head(folder), args.draft)
    engine = ValuSpecEngine(
        target,
        drafter=Drafter(),
        thresholds=thresholds,
        max_batch_size=args.max_batch_size,
        kv_tokens=args.kv_cache_tokens,
        head=head,
    )
    _warm_up(engine)
    engine.live_costs = live_costs(target, args.max_batch_size)
    return target, engine


def _warm_up(engine: Engine) -> None:
    """Run one request, so that no client waits for what is compiled on first use."""
    prompt = tuple(range(1, 9)) * 4  # repeats itself, so there is something to draft
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine.add(
        GenerationRequest(
            request_id="warm-up", prompt_ids=prompt, params=params, namespace="warm-up"
        )
    )
    while engine.has_work:
        engine.step()
