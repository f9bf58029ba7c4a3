"""Draft sources that propose what no honest source would. Output must not move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valuspec.drafting.drafter import Drafter, DraftSession, TokenIds
from valuspec.evidence import CandidateTree, Evidence
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

#: Draws a tree: (generator, tokens the target will produce next, vocabulary, most nodes, depth).
Adversary = Callable[[np.random.Generator, Sequence[int], int, int, int], DraftTree]


def random_trees(
    rng: np.random.Generator, future: Sequence[int], vocab: int, nodes: int, depth: int
) -> DraftTree:
    """Random tokens in a random shape."""
    return _grown(rng, [], [], _size(rng, nodes), vocab, depth)


def wrong_trees(
    rng: np.random.Generator, future: Sequence[int], vocab: int, nodes: int, depth: int
) -> DraftTree:
    """The right continuation under wrong first tokens: every node must be rejected."""
    if not future:
        return DraftTree.empty()
    nodes = max(_size(rng, nodes), min(nodes, 4))
    first = (future[0] + rng.integers(1, vocab, 4)) % vocab
    tokens, parents = first.tolist(), [-1] * 4
    for level, token in enumerate(future[: depth - 1]):
        if len(tokens) + 4 > nodes:
            break
        tokens += [int(token)] * 4
        parents += list(range(4 * level, 4 * level + 4))
    return DraftTree.from_lists(tokens[:nodes], parents[:nodes])


def hidden_truth(
    rng: np.random.Generator, future: Sequence[int], vocab: int, nodes: int, depth: int
) -> DraftTree:
    """A part of the right continuation among random nodes, which also hang off its path."""
    tokens: list[int] = []
    parents: list[int] = []
    last = -1
    for token in future[: int(rng.integers(0, depth + 1))]:
        noise = int(rng.integers(0, 4))
        if len(tokens) + noise + 1 > nodes:
            break
        grown = _grown(rng, tokens, parents, noise, vocab, depth)
        tokens, parents = grown.tokens.tolist(), grown.parents.tolist()
        tokens.append(int(token))
        parents.append(last)
        last = len(tokens) - 1
    return _grown(rng, tokens, parents, _size(rng, nodes - len(tokens)), vocab, depth)


def _size(rng: np.random.Generator, most: int) -> int:
    """0 to `most`, small sizes as often as large ones: they are what steps are made of."""
    return int((most + 1) ** rng.random()) - 1


def _grown(
    rng: np.random.Generator,
    tokens: Sequence[int],
    parents: Sequence[int],
    added: int,
    vocab: int,
    depth: int,
) -> DraftTree:
    """The tree with `added` random nodes at random places."""
    tokens, parents = list(tokens), list(parents)
    depths = DraftTree.from_lists(tokens, parents).depths().tolist()
    while added > 0:
        parent = int(rng.integers(-1, len(tokens)))
        level = 1 if parent < 0 else depths[parent] + 1
        if level > depth:
            continue
        tokens.append(int(rng.integers(0, vocab)))
        parents.append(parent)
        depths.append(level)
        added -= 1
    return DraftTree.from_lists(tokens, parents)


class ScriptedDrafter(Drafter):
    """Proposes what an adversary draws; knows the outputs of the prompts in `futures`."""

    def __init__(
        self,
        adversaries: Sequence[Adversary],
        vocab_size: int,
        futures: Mapping[tuple[int, ...], Sequence[int]],
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.adversaries = adversaries
        self.vocab_size = vocab_size
        self.futures = futures
        self.rng = np.random.default_rng(seed)

    def start(self, namespace: str, prompt_ids: TokenIds) -> DraftSession:
        return ScriptedSession(self, self.futures.get(tuple(prompt_ids), ()))

    def remember(self, *_: Any) -> None:
        return


class ScriptedSession(DraftSession):
    """One request of a ScriptedDrafter; a step's adversary is chosen at random."""

    def __init__(self, drafter: ScriptedDrafter, future: Sequence[int]) -> None:
        self._script = drafter
        self._future = list(future)

    def extend(self, token_ids: TokenIds) -> None:
        del self._future[: len(token_ids)]

    def add_retrieved(self, trees: Iterable[DraftTree]) -> None:
        return

    def propose(self, max_nodes: int = 64, max_depth: int = 15) -> CandidateTree:
        script = self._script
        draw = script.adversaries[int(script.rng.integers(len(script.adversaries)))]
        tree = draw(script.rng, self._future, script.vocab_size, max_nodes, max_depth)
        return CandidateTree(tree, Evidence.of_tree(tree))


class EitherDrafter(Drafter):
    """Each request uses one of several drafters, drawn at random."""

    def __init__(self, drafters: Sequence[Drafter], seed: int) -> None:
        super().__init__()
        self.drafters = drafters
        self.rng = np.random.default_rng(seed)

    def start(self, namespace: str, prompt_ids: TokenIds) -> DraftSession:
        drawn = self.drafters[int(self.rng.integers(len(self.drafters)))]
        return drawn.start(namespace, prompt_ids)

    def remember(self, *_: Any) -> None:
        return


def keep_all(
    candidates: Sequence[CandidateTree],
    thresholds: Sequence[ThresholdSet],
    batch_size: int,
    max_nodes: int,
) -> list[NDArray[np.int32]]:
    """A filter that filters nothing; parents precede children, so a prefix is a tree."""
    share = max_nodes // batch_size
    return [np.arange(min(len(c), share), dtype=np.int32) for c in candidates]
