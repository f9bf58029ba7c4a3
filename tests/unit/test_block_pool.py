"""Blocks over random histories, against a plain record of who holds what."""

from __future__ import annotations

import itertools

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


def keep(pool: BlockPool, blocks: list[int], namespace: str, tokens: list[list[int]]) -> None:
    before = [root_key(namespace), *keys_of(namespace, tokens)]
    for block, key, own in zip(blocks, before, tokens, strict=False):
        pool.keep(block, key, np.array(own))


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
    keep(pool, first[:2], "a", [[1], [2]])
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
    for tokens in ([[1], [2]], [[7], [8]]):
        blocks = pool.allocate(2)
        keep(pool, blocks, "a", tokens)
        pool.release(blocks)
    pool.allocate(1)
    assert len(pool.find(old)) == 1
    pool.allocate(2)
    assert (len(pool.find(old)), len(pool.find(new))) == (0, 1)


def test_contexts_that_part_within_a_block_find_what_they_have_in_common() -> None:
    pool = BlockPool(4)
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    blocks = pool.allocate(4)
    keep(pool, blocks[:2], "a", tokens)
    root, first = root_key("a"), keys_of("a", tokens)[0]
    pool.keep(blocks[2], first, np.array([5, 6, 9]))  # ended within the block
    pool.keep(blocks[3], root_key("b"), np.array([1, 2, 3, 4]))
    for before, wanted, found in [
        (root, [1, 2, 3, 9], (blocks[0], 3)),
        (root, [1, 2], (blocks[0], 2)),
        (root, [2, 2], (-1, 0)),
        (root, [], (-1, 0)),
        (first, [5, 6, 7, 1], (blocks[1], 3)),
        (first, [5, 6, 9, 1], (blocks[2], 3)),
        (keys_of("a", tokens)[1], [5, 6, 7], (-1, 0)),
    ]:
        assert pool.continuation(before, np.array(wanted, np.int64)) == found
    assert pool.find(keys_of("a", [[1, 2, 3, 4], [5, 6, 9]])[:1]) == blocks[:1]
    pool.release(blocks)
    assert len(pool.allocate(4)) == 4
    assert pool.continuation(first, np.array([5, 6])) == (-1, 0), "given up"


def test_more_than_there_is_cannot_be_had() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)


def num_common(a: list[int], b: list[int]) -> int:
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )


TOKENS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=2), min_size=1, max_size=4)


class Histories(RuleBasedStateMachine):
    """Sequences of few different contexts come, grow, offer their blocks and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[tuple[list[list[int]], list[int]]] = []
        """Tokens of a sequence, block by block, and its blocks."""
        self.content: dict[int, tuple[bytes, list[int]]] = {}
        """What comes before a block, and what it holds, while it may be read."""

    @precondition(lambda self: self.pool.num_available >= 4)
    @rule(tokens=TOKENS)
    def come(self, tokens: list[list[int]]) -> None:
        before = [root_key("a"), *keys_of("a", tokens)]
        shared = self.pool.share(before[1:])
        for block, key, own in zip(shared, before, tokens, strict=False):
            assert self.content[block] == (key, own), "not its content"
        new = self.pool.allocate(len(tokens) - len(shared))
        assert not set(new) & {block for _, blocks in self.held for block in blocks}
        for i, block in enumerate(new, start=len(shared)):
            self.content[block] = (before[i], tokens[i])
        self.held.append((tokens, shared + new))

    @rule(tokens=TOKENS)
    def look_for_a_continuation(self, tokens: list[list[int]]) -> None:
        before = [root_key("a"), *keys_of("a", tokens[:-1])][-1]
        block, count = self.pool.continuation(before, np.array(tokens[-1]))
        in_common = [
            num_common(own, tokens[-1])
            for b, (key, own) in self.content.items()
            if key == before and b in self.pool._key_of
        ]
        assert count == max(in_common, default=0)
        if count:
            key, own = self.content[block]
            assert (key, own[:count]) == (before, tokens[-1][:count])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        tokens, blocks = data.draw(st.sampled_from(self.held))
        keep(self.pool, blocks, "a", tokens)
        assert len(self.pool.find(keys_of("a", tokens))) == len(tokens)

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
        tokens = [[int(t)] for t in rng.integers(0, 3, rng.integers(1, 6))]
        keys = keys_of("a", tokens)
        if pool.num_available >= len(keys) and rng.random() < 0.6:
            blocks = pool.share(keys)
            blocks += pool.allocate(len(keys) - len(blocks))
            keep(pool, blocks, "a", tokens)
            held.append(blocks)
        elif held:
            pool.release(held.pop(int(rng.integers(len(held)))))
    for blocks in held:
        pool.release(blocks)
    assert pool.num_available == 40
    assert sorted(pool.allocate(40)) == list(range(40))
    assert pool.num_kept == 0
