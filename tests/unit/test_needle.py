"""A needle in random haystacks: one request's logits, alone and in whatever company.

Among up to 15 others that come, end, are cancelled and are preempted; with its prompt computed at
once or in chunks, beside decoding or not, or found in the cache; with trees of its own and of its
mates. Every logits row must have the bits of the request decoded alone, token by token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from bench.adversary import EitherDrafter, hidden_truth, keep_all, random_trees, wrong_trees
from bench.recorder import Output, Recorder, RecordingTarget
from tests.support import engines
from tests.support.tiny_models import tiny_target
from valuspec.drafting.drafter import Drafter
from valuspec.engine import engine as engine_module
from valuspec.engine.attention import Attention
from valuspec.engine.engine import Engine
from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.probe import choose_exact_mode
from valuspec.engine.rows import Rows
from valuspec.engine.scheduler import schedule
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest
from valuspec.thresholds import ThresholdSet

pytestmark = pytest.mark.usefixtures("one_thread")
TRIALS = 200
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def target() -> Target:
    target = tiny_target("llama", dtype=torch.bfloat16)
    target.exact_mode, target.min_width = choose_exact_mode(target)
    assert target.exact
    return target


def recorder(target: Target, drafter: Drafter, **options: Any) -> Recorder:
    recording: Any = RecordingTarget(target)
    thresholds = ThresholdSet.starting(target.model_fingerprint)
    engine = Engine(
        recording, drafter=drafter, thresholds=thresholds, node_filter=keep_all, **options
    )
    return Recorder(engine, recording)


def needles() -> list[GenerationRequest]:
    """Short, longer than a block, and nearly two blocks, which the output goes beyond."""
    return [
        engines.request(f"needle {n}", engines.random_prompt(n, n), max_tokens=NUM_TOKENS,
                        ignore_eos=True)
        for n in (5, BLOCK + 30, 2 * BLOCK - 10)
    ]  # fmt: skip


def alone(target: Target, needle: GenerationRequest) -> Output:
    plain = recorder(target, Drafter(), max_batch_size=1, reuse_prefixes=False)
    plain.add(replace(needle, params=replace(needle.params, speculative=False)))
    while plain.engine.has_work:
        plain.step()
    return plain.outputs[needle.request_id]


def hidden(
    target: Target,
    needle: GenerationRequest,
    expected: Output,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Output, int]:
    """The needle's output in one random company, and how often anybody was preempted."""
    rows = int(rng.choice([16, 40, 100, 256]))
    chunked = partial(schedule, mixed_rows=int(rng.choice([8, 33, 64])))
    monkeypatch.setattr(
        engine_module, "schedule", lambda *a, **k: chunked(*a, **(k | {"prefill_rows": rows}))
    )
    scripted = engines.scripted(
        target,
        {needle.prompt_ids: expected.token_ids},
        hidden_truth,
        random_trees,
        wrong_trees,
        seed=int(rng.integers(1 << 30)),
    )
    places = int(rng.integers(1, 17))
    hay = recorder(
        target,
        EitherDrafter((scripted, Drafter()), int(rng.integers(1 << 30))),
        max_batch_size=places,
        kv_tokens=BLOCK * int(rng.integers(4, 4 + 2 * places)),
    )
    waiting = []
    for mate in range(int(rng.integers(0, 16))):
        length = int(rng.integers(1, 2 * BLOCK))
        prompt = engines.random_prompt(int(rng.integers(1 << 30)), length)
        if rng.random() < 0.3:  # begins like the needle
            prompt = (*needle.prompt_ids, *prompt[:20])
        most = int(rng.integers(1, 2 * NUM_TOKENS))
        waiting.append(engines.request(f"mate {mate}", prompt, max_tokens=most))
    waiting.insert(int(rng.integers(0, len(waiting) + 1)), needle)
    preempted = 0
    while waiting or hay.engine.has_work:
        while waiting and rng.random() < 0.5:
            hay.add(waiting.pop(0))
        for step in hay.step():
            if step.stats is not None:
                preempted += step.stats.num_preemptions
        if rng.random() < 0.1:
            hay.engine.cancel(f"mate {rng.integers(16)}")
    return hay.outputs[needle.request_id], preempted


def test_a_needle_in_200_haystacks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(needle, alone(target, needle)) for needle in needles()]
    preempted = 0
    for trial in range(TRIALS):
        needle, expected = cases[trial % len(cases)]
        rng = np.random.default_rng(trial)
        found, times = hidden(target, needle, expected, rng, monkeypatch)
        assert found.token_ids == expected.token_ids, trial
        assert found.digests == expected.digests, trial
        preempted += times
    assert preempted > 20, "the haystacks were too small"


def test_the_search_finds_a_needle_that_is_bent(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that depend ever so little on the number of rows are noticed."""
    needle = needles()[0]
    expected = alone(target, needle)
    forward = target.decoder.forward

    class Bent:
        def forward(self, rows: Rows, attention: Attention) -> torch.Tensor:
            return forward(rows, attention) * (1 + 2**-7 * (rows.num_rows > 8))

    monkeypatch.setattr(target, "decoder", Bent())
    differing = 0
    for trial in range(10):
        rng = np.random.default_rng(trial)
        found, _ = hidden(target, needle, expected, rng, monkeypatch)
        differing += found.digests != expected.digests
    assert differing >= 5
