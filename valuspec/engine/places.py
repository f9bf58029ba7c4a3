"""Places in the batch, and the cache's blocks of the sequences that hold one."""

from __future__ import annotations

from typing import NamedTuple

from valuspec.engine.block_pool import BlockPool, Key
from valuspec.engine.kv_cache import BLOCK, Int64Array
from valuspec.engine.proposal import MAX_TREE_NODES
from valuspec.engine.scheduler import Running, Waiting
from valuspec.engine.sequence import Sequence

#: Fewer tokens are computed as quickly as they are copied.
FEWEST_COPIED = 8


class BlockCopy(NamedTuple):
    """The first `num_tokens` tokens of one block that another is to begin with."""

    source: int
    target: int
    num_tokens: int


def blocks_for(num_tokens: int) -> int:
    """Blocks for so many committed tokens and the largest tree behind them."""
    return -(-(num_tokens + 1 + MAX_TREE_NODES) // BLOCK)


class Places:
    """Gives sequences a place and blocks, and takes them back.

    tables: int64 [places, blocks of a sequence]; written here, read by the cache
    reuse_prefixes: let sequences of a namespace that begin alike share blocks
    """

    def __init__(self, tables: Int64Array, num_blocks: int, *, reuse_prefixes: bool) -> None:
        self.tables = tables
        self.pool = BlockPool(num_blocks)
        self.free = list(range(len(tables) - 1, -1, -1))
        self._reuse_prefixes = reuse_prefixes

    def as_running(self, sequence: Sequence) -> Running:
        """What the scheduler has to know of a sequence with a place."""
        growth = 0
        if sequence.committed == sequence.context:
            growth = blocks_for(sequence.committed) - len(sequence.blocks)
        alone = sum(self.pool.num_users(block) == 1 for block in sequence.blocks)
        return Running(sequence.context, sequence.committed, growth, alone)

    def as_waiting(self, sequence: Sequence) -> Waiting:
        """What the scheduler has to know of a sequence without one."""
        found = self.pool.find(self._reusable(sequence))
        in_use = sum(self.pool.num_users(block) > 0 for block in found)
        wanted = blocks_for(sequence.context) - in_use
        return Waiting(sequence.context, wanted, len(found) * BLOCK)

    def take(self, sequence: Sequence) -> BlockCopy | None:
        """Give a sequence a place and blocks for its context, those it can share to begin with.

        What it has in common with a kept block behind these is to be copied, and committed, before
        anything else is done with the cache.
        """
        sequence.place = self.free.pop()
        sequence.blocks = self.pool.share(self._reusable(sequence))
        shared = sequence.num_kept = len(sequence.blocks)
        sequence.committed = shared * BLOCK
        self.grow(sequence, sequence.context)
        # Not the last token, though its logits may not be wanted: this step is to compute some.
        end = min(sequence.committed + BLOCK, sequence.context - 1)
        wanted = sequence.tokens(sequence.committed, end)
        source, count = self.pool.continuation(sequence.key_before(shared), wanted)
        if count < FEWEST_COPIED:
            return None
        return BlockCopy(source, sequence.blocks[shared], count)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence blocks for `num_tokens` and a tree."""
        sequence.blocks += self.pool.allocate(blocks_for(num_tokens) - len(sequence.blocks))
        self.tables[sequence.place, : len(sequence.blocks)] = sequence.blocks

    def offer(self, sequence: Sequence) -> None:
        """Let others share the blocks that have become full."""
        if self._reuse_prefixes:
            for index in range(sequence.num_kept, self._num_computed(sequence) // BLOCK):
                self._keep(sequence, index, (index + 1) * BLOCK)
                sequence.num_kept = index + 1

    def give_back(self, sequence: Sequence) -> None:
        """Free a sequence's place, and its blocks as far as nobody shares them."""
        computed = self._num_computed(sequence)
        if self._reuse_prefixes and computed % BLOCK >= FEWEST_COPIED:
            self._keep(sequence, computed // BLOCK, computed)
        self.free.append(sequence.place)
        self.pool.release(sequence.blocks)
        sequence.place, sequence.blocks, sequence.committed = -1, [], 0

    def _num_computed(self, sequence: Sequence) -> int:
        # An accepted run may have ended early: the cache then holds more than the output.
        return min(sequence.committed, sequence.context)

    def _keep(self, sequence: Sequence, index: int, end: int) -> None:
        """Keep a sequence's block with its tokens up to `end`."""
        tokens = sequence.tokens(index * BLOCK, end)
        self.pool.keep(sequence.blocks[index], sequence.key_before(index), tokens)

    def _reusable(self, sequence: Sequence) -> list[Key]:
        """Keys of the blocks a sequence may take over; its last prompt token is computed anew, as
        its logits are wanted."""
        most = sequence.context - (0 if sequence.output_ids else 1)
        return sequence.extend_keys()[: most // BLOCK]
