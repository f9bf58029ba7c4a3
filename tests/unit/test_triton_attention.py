"""The GPU's attention kernels, run by Triton's interpreter on the CPU, and compiled without a GPU.

Compared with the CPU's attention, closely, and with itself, bit for bit: whatever tree, batch or
padding a row is computed in, it gets what one-token decoding gives.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.engine.attention import Attention, attention_for
from valuspec.engine.kv_cache import BLOCK, KvCache, own_blocks
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.probe import random_tree
from valuspec.engine.rows import NEAR, SequenceRows, build_rows
from valuspec.engine.two_zone import TwoZoneAttention

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux alone", allow_module_level=True)

from triton.runtime import interpreter

from valuspec.engine import triton_attention
from valuspec.engine.triton_attention import PRODUCT, SLICE, TILE, TritonAttention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _products_that_treat_rows_alike() -> Iterator[None]:
    """As a GPU's do. The interpreter's are numpy's, where on some processors a row's bits depend
    on its place in the tile."""

    def create_dot(_builder: Any, a: Any, b: Any, d: Any, *_: Any) -> interpreter.TensorHandle:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=np.float64)
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


VOCAB = 50
PATH = 3
"""Tokens of the trajectory that trees are compared on."""
#: Before the near zone is full; on both sides of a block's end; of a slice's; in the third slice.
LENGTHS = (1, 9, NEAR, 40, BLOCK - 3, BLOCK + NEAR, SLICE + NEAR - 3, SLICE + NEAR, 2 * SLICE + 70)


@dataclass
class Model:
    """One layer of attention whose rows' queries, keys and values follow from their tokens."""

    kv_heads: int = 1
    group: int = 2
    size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    def cache(self, num_sequences: int, num_slots: int) -> KvCache:
        """Filled with what earlier sequences left; blocks lie scattered."""
        tables = own_blocks(num_sequences, num_slots)
        cache = KvCache(
            num_layers=1,
            num_blocks=tables.size,
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_size=self.size,
            dtype=self.dtype,
            device=torch.device("cpu"),
            tables=np.random.default_rng(0).permutation(tables.ravel()).reshape(tables.shape),
        )
        cache.keys.fill_(7.0)
        cache.values.fill_(-9.0)
        return cache

    def qkv(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (VOCAB, (self.group + 2) * self.kv_heads, self.size)
        turn = torch.cos(positions.float() * 0.1)[:, None, None]
        return (torch.randn(shape, generator=generator)[tokens] * 2 + turn).to(self.dtype)

    def attend(
        self,
        attention: type[Attention],
        cache: KvCache,
        *members: SequenceRows,
        width: int = 4,
    ) -> torch.Tensor:
        """Output of the rows, [rows, heads * size]."""
        count = sum(map(len, members))
        rows = build_rows(list(members), np.array([0]), cache.device, min_width=width)
        qkv = self.qkv(rows.token_ids, rows.positions)
        out = attention(rows, cache).attend(0, qkv, window=self.window, softcap=self.softcap)
        return out[:count].clone()

    def fill(self, cache: KvCache, place: int, tokens: np.ndarray) -> None:
        """Commit a context."""
        if len(tokens):
            self.attend(PathAttention, cache, SequenceRows.chain(place, 0, tokens))


def one_by_one(
    model: Model, attention: type[Attention], cache: KvCache, start: int, tokens: np.ndarray
) -> list[torch.Tensor]:
    """Outputs of plain decoding: token after token, one row each."""
    return [
        model.attend(attention, cache, SequenceRows.chain(0, position, tokens[i : i + 1]))[0]
        for i, (position, _) in enumerate(enumerate(tokens, start))
    ]


def differing(model: Model, start: int, seed: int) -> list[int]:
    """Depths of a random tree's trajectory whose bits differ from plain decoding's.

    The tree is computed alone, and between two others with more padding.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, start + PATH)
    cache = model.cache(3, start + 100)
    model.fill(cache, 0, tokens[:start])
    mates = []
    for place in (1, 2):
        length = int(rng.integers(1, start + 40))
        model.fill(cache, place, rng.integers(0, VOCAB, length))
        mates.append(random_tree(rng, length, rng.integers(0, VOCAB, 2), VOCAB, place)[0])
    expected = one_by_one(model, TritonAttention, cache, start, tokens[start:])
    tree, path = random_tree(rng, start, tokens[start:], VOCAB, 0)
    alone = model.attend(TritonAttention, cache, tree)
    among = model.attend(TritonAttention, cache, mates[0], tree, mates[1], width=64)
    found = []
    for outputs, offset in ((alone, 0), (among, len(mates[0]))):
        pairs = zip(path, expected, strict=False)
        found += [
            d for d, (row, e) in enumerate(pairs) if not torch.equal(outputs[offset + row], e)
        ]
    return found


@settings(max_examples=16, deadline=None)
@given(
    start=st.sampled_from(LENGTHS),
    seed=st.integers(0, 2**32 - 1),
    group=st.sampled_from([1, 2, 3]),
    window=st.sampled_from([None, 7, 30, SLICE + 1]),
)
def test_a_row_has_the_bits_of_plain_decoding(
    start: int, seed: int, group: int, window: int | None
) -> None:
    """In a tree, beside other sequences, with more padding; blocks scattered."""
    assert differing(Model(group=group, window=window), start, seed) == []


@pytest.mark.parametrize("start", [SLICE - 2, 2 * SLICE + 70])
def test_long_contexts_are_exact(start: int) -> None:
    assert differing(Model(kv_heads=2), start, seed=start) == []


def test_splitting_sums_elsewhere_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of bits notices what must stay fixed."""
    model, start = Model(), 300
    tokens = np.random.default_rng(0).integers(0, VOCAB, start + 1)
    cache = model.cache(1, start + 20)
    model.fill(cache, 0, tokens[:start])
    row = SequenceRows.chain(0, start, tokens[start:])
    expected = model.attend(TritonAttention, cache, row)
    monkeypatch.setattr(triton_attention, "SLICE", 128)
    found = model.attend(TritonAttention, cache, row)
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(
    ("model", "start"),
    [
        (Model(), 2 * BLOCK + 11),
        (Model(kv_heads=2), 2 * SLICE + 70),
        (Model(kv_heads=2, group=3, size=24), 2 * BLOCK + 11),
        (Model(group=1, size=64, window=21), BLOCK + 3),
        (Model(group=1, window=SLICE), 2 * SLICE + 70),
        (Model(group=5, window=7), 50),
        (Model(softcap=3.0), BLOCK + 3),
        (Model(group=TILE + 1), 40),
    ],
    ids=[
        "plain",
        "three slices",
        "head size 24",
        "window",
        "window without the first slice",
        "window inside the near zone",
        "softcap",
        "wide group",
    ],
)
def test_outputs_are_those_of_the_cpu(model: Model, start: int) -> None:
    """A prompt's chunk, and a tree behind a context."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, start + NEAR)
    caches = [model.cache(2, start + 80) for _ in range(2)]
    chunk = SequenceRows.chain(1, 0, tokens[:5])
    tree, _ = random_tree(rng, start, tokens[start : start + 4], VOCAB, 0)
    outputs = []
    for cache, attention in zip(caches, (PathAttention, TritonAttention), strict=True):
        model.fill(cache, 0, tokens[:start])
        outputs.append(model.attend(attention, cache, chunk, tree))
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=2e-5)
    # Stored as the CPU stores them, where the CPU does: nothing else was written.
    assert torch.equal(caches[0].keys, caches[1].keys)
    stored = [cache.values[..., : model.size] for cache in caches]
    assert torch.equal(stored[0], stored[1])


def test_half_precision_is_close_to_matrix_products() -> None:
    model = Model(kv_heads=2, dtype=torch.float16)
    tokens = np.random.default_rng(5).integers(0, VOCAB, 160)
    outputs = []
    for attention in (TwoZoneAttention, TritonAttention):
        cache = model.cache(1, 200)
        cache.keys.zero_()
        cache.values.zero_()
        model.attend(TwoZoneAttention, cache, SequenceRows.chain(0, 0, tokens[:150]))
        rows = SequenceRows(0, 150, tokens[150:156], np.array([-1, 0, 0, 1, 2, 2]))
        outputs.append(model.attend(attention, cache, rows))
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-2, rtol=2e-2)


def test_what_other_sequences_left_is_not_read() -> None:
    """Even infinities: a weight of zero would make NaN of them."""
    model = Model()
    start = PRODUCT + NEAR + 5  # the second product reaches far beyond the tree
    tokens = np.random.default_rng(2).integers(0, VOCAB, start + 4)
    rows = SequenceRows(0, start, tokens[start:], np.array([-1, 0, 0, 2]))
    outputs = []
    for left in (0.0, float("inf")):
        cache = model.cache(1, start + 10)
        cache.keys.fill_(left)
        cache.values.fill_(left)
        model.fill(cache, 0, tokens[:start])
        outputs.append(model.attend(TritonAttention, cache, rows))
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("group", [1, 3, TILE])
def test_tiles_hold_every_row_once_and_one_sequence_each(group: int) -> None:
    """The interpreter runs programs in turn: two that write one row would race on a GPU alone."""
    cache = Model(group=group).cache(3, 200)
    counts = (TILE + 7, 1, 11)
    members = [SequenceRows.chain(i, 5, np.arange(n)) for i, n in enumerate(counts)]
    rows = build_rows(members, np.array([0]), cache.device, min_width=64)
    width = len(rows.token_ids)
    _, cells, sequences, tile_rows = triton_attention.row_plan(rows, cache, width)[:4]
    tiles = [np.arange(first, first + tile_rows[first]) for first in np.flatnonzero(tile_rows)]
    assert np.array_equal(np.concatenate(tiles), np.arange(sum(counts)))
    assert all(len(tile) * group <= TILE for tile in tiles)
    assert all(len(set(sequences[tile])) == 1 for tile in tiles)
    assert np.array_equal(np.flatnonzero(cells < 0), np.arange(sum(counts), width))


# ---- without a GPU, and without the interpreter


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """To machine code: tensor cores for bf16, no atomics, registers not spilled."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_compiling"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert {(c["kernel"], c["compute_capability"]) for c in compiled} == {
        (name, capability)
        for name in ("store_rows", "far_zone", "near_zone")
        for capability in (80, 90)
    }
    for each in compiled:
        assert not each["atomics"], each
        assert each["spilled_bytes"] == 0, each
        assert each["shared_bytes"] < 100_000, each
        assert each["tensor_cores"] == (each["kernel"] != "store_rows"), each


# ---- who uses them


def test_cuda_devices_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "try_out", lambda *_: None)
    for dtype in (torch.bfloat16, torch.float32):
        assert attention_for(torch.device("cuda"), dtype) is TritonAttention
        assert attention_for(torch.device("cpu"), dtype) is PathAttention


def test_trying_out_runs_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for name in ("store_rows", "far_zone", "near_zone"):
        kernel = getattr(triton_attention.triton_kernels, name)
        run = kernel.run

        def launch(*args: Any, name: str = name, run: Any = run, **kwargs: Any) -> Any:
            launched.append(name)
            return run(*args, **kwargs)

        monkeypatch.setattr(kernel, "run", launch)
    TritonAttention.try_out(torch.device("cpu"), torch.float32)
    assert launched == ["store_rows", "far_zone", "near_zone"]


def test_without_triton_they_take_matrix_products_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonAttention, "try_out", no_compiler)
    assert attention_for(torch.device("cuda"), torch.bfloat16) is TwoZoneAttention
    monkeypatch.setitem(sys.modules, "valuspec.engine.triton_attention", None)
    assert attention_for(torch.device("cuda"), torch.bfloat16) is TwoZoneAttention
    messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 2
    assert all("no Triton kernels for attention" in message for message in messages)
    assert "C compiler" in messages[0]
