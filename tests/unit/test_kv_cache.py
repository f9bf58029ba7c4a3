"""The block cache against a plain array [layers, sequences, slots, heads, size]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.engine.kv_cache import BLOCK, ONES, KvCache

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, SEQUENCES, HEADS, SIZE = 2, 3, 2, 4


@dataclass
class Naive:
    """What the cache should hold; zero where nothing was written."""

    keys: torch.Tensor
    values: torch.Tensor
    ones: torch.Tensor
    """One where a value was written, [sequences, slots]."""


def new_cache(slots: int) -> tuple[KvCache, Naive]:
    cache = KvCache(
        num_layers=LAYERS,
        num_sequences=SEQUENCES,
        num_heads=2 * HEADS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.reserve(slots)
    shape = (LAYERS, SEQUENCES, cache.num_blocks * BLOCK, HEADS, SIZE)
    return cache, Naive(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape[1:3]))


def write(cache: KvCache, naive: Naive, sequences: list[int], slots: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    owners, where = np.array(sequences), np.array(slots)
    offsets = torch.from_numpy(cache.key_offsets(owners, where))
    rows = torch.from_numpy(cache.value_rows(owners, where))
    for layer in range(LAYERS):
        keys = torch.randn(len(slots), HEADS, SIZE, generator=generator)
        values = torch.randn(len(slots), HEADS, SIZE, generator=generator)
        cache.write(layer, offsets, rows, keys, values)
        naive.keys[layer, owners, where] = keys
        naive.values[layer, owners, where] = values
    naive.ones[owners, where] = 1


def check(cache: KvCache, naive: Naive) -> None:
    """Compare everything, through the blocks that attention reads."""
    for layer in range(LAYERS):
        for block in range(naive.keys.shape[2] // BLOCK):
            span = slice(block * BLOCK, (block + 1) * BLOCK)
            keys = cache.key_block(layer, block, 0, SEQUENCES)
            values = cache.value_block(layer, block, 0, SEQUENCES)
            expected = naive.keys[layer, :, span].permute(0, 2, 3, 1).flatten(0, 1)
            assert torch.equal(keys, expected)
            expected = naive.values[layer, :, span].permute(0, 2, 1, 3).flatten(0, 1)
            assert torch.equal(values[..., :SIZE], expected)
            ones = naive.ones[:, None, span, None].expand(-1, HEADS, -1, ONES).flatten(0, 1)
            assert torch.equal(values[..., SIZE:], ones), "every stored value ends in ones"


def test_writes_land_where_attention_reads() -> None:
    cache, naive = new_cache(2 * BLOCK)
    check(cache, naive)
    write(cache, naive, [0, 0, 2, 1, 2], [0, BLOCK, BLOCK - 1, 7, 2 * BLOCK - 1], seed=1)
    check(cache, naive)
    one = cache.key_block(1, 0, 2, 1)
    assert torch.equal(one, naive.keys[1, 2, :BLOCK].permute(1, 2, 0))


def test_reserve_keeps_contents() -> None:
    cache, naive = new_cache(10)
    assert cache.num_blocks == 1
    write(cache, naive, [0, 1, 2], [0, 5, BLOCK - 1], seed=2)
    cache.reserve(BLOCK)
    assert cache.num_blocks == 1
    cache.reserve(BLOCK + 1)
    assert cache.num_blocks == 2
    more = torch.zeros(LAYERS, SEQUENCES, BLOCK, HEADS, SIZE)
    naive = Naive(
        torch.cat([naive.keys, more], 2),
        torch.cat([naive.values, more], 2),
        torch.cat([naive.ones, torch.zeros(SEQUENCES, BLOCK)], 1),
    )
    check(cache, naive)
    write(cache, naive, [2], [BLOCK + 1], seed=3)
    check(cache, naive)
    cache.reserve(1)
    assert cache.num_blocks == 2


def test_reserve_grows_by_doubling() -> None:
    cache, _ = new_cache(3 * BLOCK)
    cache.reserve(3 * BLOCK + 1)
    assert cache.num_blocks == 6
    cache.reserve(20 * BLOCK)
    assert cache.num_blocks == 20


@settings(max_examples=40)
@given(data=st.data())
def test_move_reads_everything_before_it_writes(data: st.DataObject) -> None:
    """Accepted paths move to the front; sources may be other moves' targets."""
    cache, naive = new_cache(2 * BLOCK)
    pairs = st.tuples(st.integers(0, SEQUENCES - 1), st.integers(BLOCK - 6, BLOCK + 6))
    for sequence in range(SEQUENCES):
        write(cache, naive, [sequence] * 13, list(range(BLOCK - 6, BLOCK + 7)), seed=sequence)
    targets = data.draw(st.lists(pairs, min_size=1, max_size=12, unique=True))
    sources = [(sequence, data.draw(st.integers(BLOCK - 6, BLOCK + 6))) for sequence, _ in targets]
    owners = np.array([sequence for sequence, _ in targets])
    read = np.array([slot for _, slot in sources])
    written = np.array([slot for _, slot in targets])
    keys, values = naive.keys[:, owners, read], naive.values[:, owners, read]
    ones = naive.ones[owners, read]
    cache.move(owners, read, written)
    naive.ones[owners, written] = ones
    naive.keys[:, owners, written], naive.values[:, owners, written] = keys, values
    check(cache, naive)


@pytest.mark.parametrize("slots", [1, BLOCK, BLOCK + 3, 2 * BLOCK])
def test_move_sequence(slots: int) -> None:
    cache, naive = new_cache(2 * BLOCK)
    write(cache, naive, [2] * (2 * BLOCK), list(range(2 * BLOCK)), seed=4)
    write(cache, naive, [1] * 5, [0, 1, BLOCK, BLOCK + 1, BLOCK + 2], seed=5)
    cache.move_sequence(2, 0, slots)
    for layer in range(LAYERS):
        for slot in range(slots):
            block, within = divmod(slot, BLOCK)
            keys = cache.key_block(layer, block, 0, 1)[..., within]
            assert torch.equal(keys, naive.keys[layer, 2, slot])
            values = cache.value_block(layer, block, 0, 1)[:, within, :SIZE]
            assert torch.equal(values, naive.values[layer, 2, slot])
        # Nobody else is touched.
        others = cache.key_block(layer, 0, 1, 2)
        expected = naive.keys[layer, 1:, :BLOCK].permute(0, 2, 3, 1).flatten(0, 1)
        assert torch.equal(others, expected)
