"""Blocks over random histories, against a plain record of who holds what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.histories import num_histories
from valuspec.engine.block_pool import BlockPool, next_key, root_key


def keys_of(namespace: str, blocks: list[list[int]]) -> list[bytes]:
    keys, key = [], root_key(namespace)
    for tokens in blocks:
        key = next_key(key, tokens)
        keys.append(key)
    return keys


def test_a_key_names_the_whole_context_and_the_namespace() -> None:
    seen = set()
    for namespace in ("a", "b"):
        for blocks in ([[1, 2]], [[1, 3]], [[1, 2], [1, 2]], [[1, 3], [1, 2]]):
            seen.add(keys_of(namespace, blocks)[-1])
    assert len(seen) == 8
    assert keys_of("a", [[1, 2], [5, 6]])[-1] == next_key(next_key(root_key("a"), [1, 2]), [5, 6])


def test_blocks_that_begin_alike_are_shared_and_stay() -> None:
    pool = BlockPool(4)
    keys = keys_of("a", [[1], [2], [3]])
    first = pool.allocate(3)
    for block, key in zip(first[:2], keys, strict=False):
        pool.keep(block, key)
    assert pool.share(keys) == first[:2]
    pool.release(first)
    assert pool.num_available == 2, "two have a user left"
    pool.release(first[:2])
    assert pool.num_available == 4
    assert pool.find(keys) == first[:2], "kept although nobody uses them"
    assert pool.share(keys[:1]) == first[:1]
    assert pool.num_available == 3


def test_kept_blocks_make_room_the_longest_unused_and_the_last_of_a_context_first() -> None:
    pool = BlockPool(4)
    old, new = keys_of("a", [[1], [2]]), keys_of("a", [[7], [8]])
    for keys in (old, new):
        blocks = pool.allocate(2)
        for block, key in zip(blocks, keys, strict=True):
            pool.keep(block, key)
        pool.release(blocks)
    pool.allocate(1)
    assert len(pool.find(old)) == 1
    pool.allocate(2)
    assert (len(pool.find(old)), len(pool.find(new))) == (0, 1)


def test_more_than_there_is_cannot_be_had() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)


class Histories(RuleBasedStateMachine):
    """Sequences of few different contexts come, grow, offer their blocks and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[tuple[list[bytes], list[int]]] = []
        self.content: dict[int, bytes] = {}
        """What a block holds, while it may be read."""

    @precondition(lambda self: self.pool.num_available >= 4)
    @rule(choice=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def come(self, choice: list[int]) -> None:
        keys = keys_of("a", [[token] for token in choice])
        shared = self.pool.share(keys)
        assert [self.content[block] for block in shared] == keys[: len(shared)], "not its content"
        new = self.pool.allocate(len(keys) - len(shared))
        assert not set(new) & {block for _, blocks in self.held for block in blocks}
        for block, key in zip(new, keys[len(shared) :], strict=True):
            self.content[block] = key
        self.held.append((keys, shared + new))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        keys, blocks = data.draw(st.sampled_from(self.held))
        for block, key in zip(blocks, keys, strict=True):
            self.pool.keep(block, key)
        assert len(self.pool.find(keys)) == len(keys)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        _, blocks = self.held.pop(index)
        self.pool.release(blocks)

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        used = {block for _, blocks in self.held for block in blocks}
        assert self.pool.num_available == self.pool.num_blocks - len(used)
        for block in range(self.pool.num_blocks):
            users = sum(blocks.count(block) for _, blocks in self.held)
            assert self.pool.num_users(block) == users


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=num_histories(60), stateful_step_count=40, deadline=None
)


def test_ten_thousand_steps_leave_nothing_behind() -> None:
    rng = np.random.default_rng(0)
    pool = BlockPool(40)
    held: list[list[int]] = []
    for _ in range(10_000):
        keys = keys_of("a", [[int(t)] for t in rng.integers(0, 3, rng.integers(1, 6))])
        if pool.num_available >= len(keys) and rng.random() < 0.6:
            blocks = pool.share(keys)
            blocks += pool.allocate(len(keys) - len(blocks))
            for block, key in zip(blocks, keys, strict=True):
                pool.keep(block, key)
            held.append(blocks)
        elif held:
            pool.release(held.pop(int(rng.integers(len(held)))))
    for blocks in held:
        pool.release(blocks)
    assert pool.num_available == 40
    assert sorted(pool.allocate(40)) == list(range(40))
    assert pool.num_kept == 0
