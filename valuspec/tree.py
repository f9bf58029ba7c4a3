"""Draft trees as flat arrays.

`parents[i] == -1` means node i hangs off the context; otherwise `parents[i] < i`, so a single
left-to-right pass visits parents before children and a cycle cannot be written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from valuspec.errors import InvalidTreeError

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Possible continuations of a context, shared prefixes stored once.

    tokens:  int32 [num_nodes], token ids
    parents: int32 [num_nodes], -1 or an earlier node
    counts:  int32 [num_nodes], how often the target went this way (>= 1)
    """

    tokens: Int32Array
    parents: Int32Array
    counts: Int32Array

    @classmethod
    def empty(cls) -> DraftTree:
        return cls.from_lists([], [])

    @classmethod
    def from_lists(
        cls, tokens: Sequence[int], parents: Sequence[int], counts: Sequence[int] | None = None
    ) -> DraftTree:
        """Build from Python sequences; counts default to one. Does not validate."""
        ones = np.ones(len(tokens), np.int32)
        return cls(
            np.asarray(tokens, np.int32),
            np.asarray(parents, np.int32),
            ones if counts is None else np.asarray(counts, np.int32),
        )

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """Merge continuations (token id sequences) into one tree; equal prefixes add up counts."""
        return cls.empty().merge(paths)

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> Int32Array:
        """Depth of each node, int32 [num_nodes]; 1 for children of the context."""
        depths = np.ones(len(self), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return depths

    def merge(self, paths: Iterable[Sequence[int]]) -> DraftTree:
        """Return this tree with every path added once; existing nodes gain a count."""
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        counts = self.counts.tolist()
        children = {(p, t): n for n, (p, t) in enumerate(zip(parents, tokens, strict=True))}
        for path in paths:
            node = -1
            for token in path:
                child = children.get((node, token))
                if child is None:
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    counts.append(0)
                counts[child] += 1
                node = child
        return DraftTree.from_lists(tokens, parents, counts)

    def select(self, kept: NDArray[np.integer]) -> DraftTree:
        """Return the subtree of the ascending node indices `kept`, int [num_kept].

        Raises InvalidTreeError unless `kept` is ancestor-closed (no node without its parent).
        """
        new_index = np.full(len(self) + 1, -1, np.int32)  # last entry serves parent -1
        new_index[kept] = np.arange(len(kept), dtype=np.int32)
        old_parents = self.parents[kept]
        parents = new_index[old_parents]
        if ((old_parents >= 0) & (parents < 0)).any():
            raise InvalidTreeError("selection keeps a node but drops its parent")
        return DraftTree(self.tokens[kept], parents, self.counts[kept])

    def leaf_paths(self) -> list[list[int]]:
        """Node indices from the root to each leaf, in order of the leaves."""
        parents = self.parents.tolist()
        inner = set(parents)
        paths = []
        for leaf in range(len(self)):
            if leaf in inner:
                continue
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = parents[node]
            paths.append(path[::-1])
        return paths

    def validate(self, *, vocab_size: int, max_nodes: int, max_depth: int) -> DraftTree:
        """Return self, or raise InvalidTreeError naming the broken rule and the limit."""
        n = len(self)
        if not len(self.parents) == len(self.counts) == n:
            raise InvalidTreeError(
                f"arrays differ in length: {n} tokens, {len(self.parents)} parents, "
                f"{len(self.counts)} counts"
            )
        if n > max_nodes:
            raise InvalidTreeError(f"{n} nodes, at most {max_nodes} allowed")
        if n == 0:
            return self
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise InvalidTreeError(
                f"token ids span {self.tokens.min()}..{self.tokens.max()}, "
                f"vocabulary has {vocab_size}"
            )
        if self.parents.min() < -1 or (self.parents >= np.arange(n)).any():
            raise InvalidTreeError("a parent does not precede its child (or is below -1)")
        if self.counts.min() < 1:
            raise InvalidTreeError(f"count {self.counts.min()}, at least 1 expected")
        if n > max_depth and (depth := int(self.depths().max())) > max_depth:
            raise InvalidTreeError(f"depth {depth}, at most {max_depth} allowed")
        return self
