"""Is speculation bit-exact on this machine? Try it at start-up instead of hoping.

One-token decoding along a random trajectory gives reference logits. Then trees that contain the
trajectory among random distractors are verified at several context lengths, also two sequences at
a time, and every row on the trajectory must have the very same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.engine.kv_cache import BLOCK, KvCache, own_blocks
from valuspec.engine.rows import NEAR, SequenceRows

if TYPE_CHECKING:
    from valuspec.engine.target import ExactMode, Target

#: Rows of the fixed envelope: a pending token and the largest tree, rounded up.
ENVELOPE = 72
#: Context lengths at which a trajectory begins: short, and close to a block's end.
_STARTS = (24, BLOCK - 20, 2 * BLOCK + 9)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Logit rows compared, and how many were equal bit for bit."""

    rows_checked: int
    rows_equal: int

    @property
    def exact(self) -> bool:
        return self.rows_checked > 0 and self.rows_equal == self.rows_checked


def choose_exact_mode(target: Target) -> tuple[ExactMode, int]:
    """Fastest mode that passes the probe, with its row padding; "fast" if none does."""
    modes: tuple[tuple[ExactMode, int], ...] = (
        ("rows", target.decoder.fewest_rows),
        ("envelope", ENVELOPE),
    )
    for mode, min_width in modes:
        target.min_width = min_width
        if probe(target).exact:
            return mode, min_width
    return "fast", target.decoder.fewest_rows


def probe(target: Target, *, num_trees: int = 12, seed: int = 0) -> ProbeResult:
    """Compare random trees with one-token decoding at the target's present row padding."""
    rng = np.random.default_rng(seed)
    checked = equal = 0
    starts = [s for s in _STARTS if s + 2 * NEAR < target.max_model_len] or [0]
    tokens = rng.integers(0, target.vocab_size, max(starts) + NEAR)
    cache = target.new_cache(own_blocks(2, len(tokens) + ENVELOPE))
    for place in (0, 1):
        prefill(target, cache, place, tokens[: max(starts)])
    # From the longest context down: what a tree overwrites lies behind every shorter one.
    for start in sorted(starts, reverse=True):
        reference = []
        for position in range(start, start + NEAR):
            alone = SequenceRows.chain(0, position, tokens[position : position + 1])
            reference.append(target.forward([alone], cache)[0])
        for trial in range(num_trees // len(starts)):
            trees = [random_tree(rng, start, tokens[start:], target.vocab_size, p) for p in (0, 1)]
            members = [rows for rows, _ in trees][: 1 + trial % 2]
            logits = target.forward(members, cache)
            offset = 0
            for rows, path in trees[: len(members)]:
                for depth, row in enumerate(path):
                    checked += 1
                    equal += torch.equal(logits[offset + row], reference[depth])
                offset += len(rows)
    return ProbeResult(checked, equal)


def prefill(target: Target, cache: KvCache, place: int, tokens: NDArray[np.int64]) -> None:
    """Fill `place` with the first tokens of a sequence, in chunks of the envelope's width."""
    for first in range(0, len(tokens), ENVELOPE):
        chunk = tokens[first : first + ENVELOPE]
        last_row = np.array([len(chunk) - 1])
        target.forward([SequenceRows.chain(place, first, chunk)], cache, last_row)


def random_tree(
    rng: np.random.Generator,
    start: int,
    trajectory: NDArray[np.int64],
    vocab_size: int,
    place: int,
) -> tuple[SequenceRows, list[int]]:
    """A tree that holds a part of `trajectory` among distractors, and the rows of that part."""
    tokens, parents, depths, path = [int(trajectory[0])], [-1], [0], [0]
    length = int(rng.integers(2, NEAR))
    for token in trajectory[1:length]:
        for _ in range(rng.integers(0, 5)):
            parent = int(rng.integers(0, len(tokens)))
            if depths[parent] + 1 < NEAR:
                tokens.append(int(rng.integers(0, vocab_size)))
                parents.append(parent)
                depths.append(depths[parent] + 1)
        tokens.append(int(token))
        parents.append(path[-1])
        depths.append(depths[path[-1]] + 1)
        path.append(len(tokens) - 1)
    return SequenceRows(place, start, np.array(tokens), np.array(parents)), path
