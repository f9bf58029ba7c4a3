"""Recorded steps, on a CPU: everything but the recording, which here is the run itself.

Whatever ran before in the same buffers, real rows get the bits that they get without padding, and
the cache holds what it holds without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.common import Prompt
from bench.identity import IdentityCheck
from tests.support import engines
from tests.support.tiny_models import tiny_target
from valuspec.engine import graphs
from valuspec.engine.graphs import WIDTHS, CudaRecorder, Run, StepGraphs, graphs_for, step_width
from valuspec.engine.kv_cache import BLOCK, KvCache, own_blocks
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.probe import ENVELOPE, random_tree
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.engine.two_zone import TwoZoneAttention
from valuspec.engine.types import SamplingParams

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux alone", allow_module_level=True)

from valuspec.engine.triton_attention import SLICE, TritonAttention

pytestmark = pytest.mark.usefixtures("one_thread")
START = 20


class Recorder:
    """Counts recordings; a run's result always lies in the same place, as a graph's does."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Run) -> Run:
        self.count += 1
        result = run().clone()
        return lambda: result.copy_(run())


@pytest.fixture(scope="module")
def eager() -> Target:
    """Every interpreted program takes milliseconds, so one layer and one kv head."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return replace(tiny_target("llama", **sizes), attention=TritonAttention)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def padded(eager: Target, recorder: Recorder) -> Target:
    return replace(eager, graphs=StepGraphs(eager.decoder, TritonAttention, recorder))


def filled_cache(target: Target, num_slots: int = BLOCK) -> KvCache:
    """Two sequences of START tokens, whatever the target's attention in the same way."""
    cache = target.new_cache(own_blocks(2, num_slots))
    plain = replace(target, attention=TwoZoneAttention, graphs=None)
    for place in (0, 1):
        tokens = np.random.default_rng(place).integers(0, target.vocab_size, START)
        plain.forward([SequenceRows.chain(place, 0, tokens)], cache)
    return cache


def steps(target: Target) -> list[tuple[list[SequenceRows], np.ndarray | None]]:
    """Trees and chunks of many sizes, alone and together, and the rows whose logits are wanted."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, target.vocab_size, 40)
    trees = [random_tree(rng, START, tokens[:n], target.vocab_size, n % 2)[0] for n in (2, 5, 3)]
    chunk = SequenceRows.chain(1, START, tokens[:6])
    one, other = (SequenceRows.chain(place, START, tokens[:1]) for place in (0, 1))
    return [
        ([trees[1]], None),
        ([one], None),
        ([trees[2]], None),
        ([one, other], None),
        ([trees[0], chunk], np.array([*range(len(trees[0])), len(trees[0]) + 5])),
        ([one], None),
    ]


def test_padded_steps_change_no_bit(eager: Target, padded: Target, recorder: Recorder) -> None:
    """Step after step in the same buffers, beside the same steps unpadded."""
    caches = [filled_cache(eager) for _ in range(3)]
    cpu = replace(eager, attention=PathAttention)
    for members, wanted in steps(eager):
        expected = eager.forward(members, caches[0], wanted)
        found = padded.forward(members, caches[1], wanted)
        assert torch.equal(found, expected)
        near = cpu.forward(members, caches[2], wanted)
        torch.testing.assert_close(found, near, atol=1e-4, rtol=1e-4)
        assert torch.equal(caches[0].keys, caches[1].keys)
        assert torch.equal(caches[0].values, caches[1].values)
    assert recorder.count < len(steps(eager)), "widths were used again"


def test_logits_outlive_the_next_step(padded: Target) -> None:
    cache = filled_cache(padded)
    tokens = np.array([3, 5])
    first = padded.forward([SequenceRows.chain(0, START, tokens[:1])], cache)
    before = first.clone()
    padded.forward([SequenceRows.chain(0, START, tokens[1:])], cache)
    assert torch.equal(first, before)


def test_blocks_are_looked_up_in_every_step(padded: Target) -> None:
    cache = filled_cache(padded)
    tokens = np.array([3])
    expected = padded.forward([SequenceRows.chain(0, START, tokens)], cache)
    cache.tables[:] = cache.tables[::-1].copy()
    found = padded.forward([SequenceRows.chain(1, START, tokens)], cache)
    assert torch.equal(found, expected)


def test_recordings_by_width_slices_and_cache(padded: Target, recorder: Recorder) -> None:
    cache = filled_cache(padded, SLICE + BLOCK)
    row = SequenceRows.chain(0, START, np.array([1]))
    far = SequenceRows.chain(0, SLICE + 40, np.array([1]))  # its far zone takes two slices
    for member, expected in ((row, 1), (row, 1), (far, 2), (row, 2), (far, 2)):
        padded.forward([member], cache)
        assert recorder.count == expected
    padded.forward([row], filled_cache(padded))
    assert recorder.count == 3


def test_more_rows_than_the_widest_are_not_recorded(padded: Target, recorder: Recorder) -> None:
    cache = filled_cache(padded)
    tokens = np.arange(WIDTHS[-1] + 1)
    padded.forward([SequenceRows.chain(0, 0, tokens)], cache, np.array([0]))
    assert recorder.count == 0


@pytest.mark.parametrize(
    ("num_rows", "min_width", "width"),
    [
        (1, 4, 4),
        (4, 4, 4),
        (5, 4, 8),
        (33, 4, 64),
        (64, 4, 64),
        (65, 4, None),
        (1, ENVELOPE, ENVELOPE),
        (ENVELOPE, ENVELOPE, ENVELOPE),
        (ENVELOPE + 1, ENVELOPE, None),
    ],
)
def test_step_width(num_rows: int, min_width: int, width: int | None) -> None:
    """A target of a fixed envelope has that one width."""
    assert step_width(num_rows, min_width) == width


def test_requests_end_to_end(padded: Target, recorder: Recorder) -> None:
    """Plain and speculative decoding through the engine, token by token and bit by bit."""
    prompts = [Prompt("0", engines.random_prompt(0, 5))]
    check = IdentityCheck(padded, prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    tally = check.modes()["truth"]()
    assert tally.exact, tally
    assert tally.accepted_tokens > 0
    assert recorder.count > 1


def test_who_records(eager: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaRecorder", Recorder)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert graphs_for(eager.decoder, TritonAttention, cuda) is not None
    assert graphs_for(eager.decoder, TritonAttention, cpu) is None
    assert graphs_for(eager.decoder, TwoZoneAttention, cuda) is None
    others = tiny_target("gpt2").decoder
    assert graphs_for(others, TritonAttention, cuda) is None
    assert eager.graphs is None


@pytest.mark.parametrize("records", [True, False])
def test_cuda_recorder(
    records: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With CUDA's part played: a run before the recording, one in it, and from then on replays."""
    events: list[str] = []

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def recording(graph: Graph, pool: str) -> Iterator[None]:
        events.append(f"begin in {pool}")
        yield
        if not records:
            raise RuntimeError("operation not permitted")
        events.append("end")

    def run() -> torch.Tensor:
        events.append("run")
        return torch.tensor(len(events))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    replay = CudaRecorder()(run)
    assert events[:3] == ["run", "begin in pool", "run"]
    if records:
        assert int(replay()) == int(replay()) == 3
        assert events[3:] == ["end", "replay", "replay"]
    else:
        assert replay is run
        assert "cannot be recorded" in caplog.text
