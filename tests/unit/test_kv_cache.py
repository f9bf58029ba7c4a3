"""The block cache against a plain array [layers, sequences, slots, heads, size]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from valuspec.engine.kv_cache import BLOCK, ONES, KvCache, own_blocks

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, SEQUENCES, HEADS, SIZE = 2, 3, 2, 4
SLOTS = 2 * BLOCK


@dataclass
class Naive:
    """What the cache should hold; zero where nothing was written."""

    keys: torch.Tensor
    values: torch.Tensor
    ones: torch.Tensor
    """One where a value was written, [sequences, slots]."""


def new_cache() -> tuple[KvCache, Naive]:
    """A cache whose sequences' blocks lie scattered, and one block more that is nobody's."""
    tables = np.random.default_rng(0).permutation(own_blocks(SEQUENCES, SLOTS).ravel())
    cache = KvCache(
        num_layers=LAYERS,
        num_blocks=len(tables) + 1,
        num_heads=2 * HEADS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        tables=tables.reshape(SEQUENCES, -1),
    )
    shape = (LAYERS, SEQUENCES, SLOTS, HEADS, SIZE)
    return cache, Naive(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape[1:3]))


def write(cache: KvCache, naive: Naive, sequences: list[int], slots: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    owners, where = np.array(sequences), np.array(slots)
    cells = cache.cells(owners, where)
    offsets = torch.from_numpy(cache.key_offsets(cells))
    rows = torch.from_numpy(cache.value_rows(cells))
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
        for block in range(SLOTS // BLOCK):
            span = slice(block * BLOCK, (block + 1) * BLOCK)
            blocks = torch.from_numpy(cache.tables[:, block])
            expected = naive.keys[layer, :, span].permute(0, 2, 3, 1).flatten(0, 1)
            assert torch.equal(cache.key_block(layer, blocks), expected)
            values = cache.value_block(layer, blocks)
            expected = naive.values[layer, :, span].permute(0, 2, 1, 3).flatten(0, 1)
            assert torch.equal(values[..., :SIZE], expected)
            ones = naive.ones[:, None, span, None].expand(-1, HEADS, -1, ONES).flatten(0, 1)
            assert torch.equal(values[..., SIZE:], ones), "every stored value ends in ones"
    nobodys = torch.tensor([cache.num_blocks - 1])
    assert not cache.key_block(0, nobodys).any()


def test_writes_land_where_attention_reads() -> None:
    cache, naive = new_cache()
    check(cache, naive)
    write(cache, naive, [0, 0, 2, 1, 2], [0, BLOCK, BLOCK - 1, 7, 2 * BLOCK - 1], seed=1)
    check(cache, naive)
    one = cache.key_block(1, torch.from_numpy(cache.tables[2, :1]))
    assert torch.equal(one, naive.keys[1, 2, :BLOCK].permute(1, 2, 0))


def test_sequences_read_the_blocks_they_share() -> None:
    cache, naive = new_cache()
    write(cache, naive, [0] * BLOCK, list(range(BLOCK)), seed=2)
    write(cache, naive, [0, 1], [BLOCK, BLOCK], seed=3)
    cache.tables[1, 0] = cache.tables[0, 0]
    for each in (naive.keys, naive.values):
        each[:, 1, :BLOCK] = each[:, 0, :BLOCK]
    naive.ones[1, :BLOCK] = 1
    check(cache, naive)


@settings(max_examples=40)
@given(data=st.data())
def test_move_reads_everything_before_it_writes(data: st.DataObject) -> None:
    """Accepted paths move to the front; sources may be other moves' targets."""
    cache, naive = new_cache()
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
    cache.move(cache.cells(owners, read), cache.cells(owners, written))
    naive.ones[owners, written] = ones
    naive.keys[:, owners, written], naive.values[:, owners, written] = keys, values
    check(cache, naive)


def test_a_slot_without_a_block_is_refused() -> None:
    cache, _ = new_cache()
    with pytest.raises(IndexError):
        cache.cells(np.array([0]), np.array([SLOTS]))
