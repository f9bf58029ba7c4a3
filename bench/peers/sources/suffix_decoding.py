"""SuffixDecoding's own cache and rule (`arctic_inference`), its path or its tree, as published.

Only the worker whose environment has the library may import this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from arctic_inference.suffix_decoding import SuffixDecodingCache

from bench.peers.sources.session import PeerDrafter, fitted
from valuspec.drafting.drafter import TokenIds
from valuspec.tree import DraftTree

MAX_TREE_DEPTH = 64
"""Depth of its suffix trees: the library's default."""
MAX_SPEC_TOKENS = 16
"""Most draft tokens of a step, as published; factor 1, offset 0 and probability 0.1 are defaults.
The deepest draft here is 15 tokens, the limit of the engine's exact attention."""


class SuffixDrafter(PeerDrafter):
    def __init__(self, *, tree: bool) -> None:
        super().__init__()
        self.tree = tree
        self.cache = SuffixDecodingCache(max_tree_depth=MAX_TREE_DEPTH)
        self._active: dict[tuple[int, ...], list[str]] = {}
        self._started = 0

    def look_up(self, prompt_ids: Sequence[int]) -> SuffixLookup:
        self._started += 1
        name = f"request-{self._started}"
        self.cache.start_request(name, prompt_ids)
        self._active.setdefault(tuple(prompt_ids), []).append(name)
        return SuffixLookup(self, name, prompt_ids)

    def remember(self, namespace: str, prompt_ids: TokenIds, output_ids: TokenIds) -> None:
        prompt = [int(token) for token in prompt_ids]
        if names := self._active.get(tuple(prompt)):
            self.cache.stop_request(names.pop())  # the cache has its answer already
            return
        self._started += 1
        name = f"request-{self._started}"
        self.cache.start_request(name, prompt)
        self.cache.add_active_response(name, [int(token) for token in output_ids])
        self.cache.stop_request(name)


class SuffixLookup:
    def __init__(self, drafter: SuffixDrafter, name: str, prompt_ids: Sequence[int]) -> None:
        self._drafter = drafter
        self._name = name
        self._tail = list(prompt_ids[-MAX_TREE_DEPTH:])

    def extend(self, token_ids: Sequence[int]) -> None:
        self._drafter.cache.add_active_response(self._name, token_ids)
        self._tail = [*self._tail, *token_ids][-MAX_TREE_DEPTH:]

    def draft(self, max_nodes: int, max_depth: int) -> DraftTree:
        found = self._drafter.cache.speculate(
            self._name,
            self._tail,
            max_spec_tokens=min(MAX_SPEC_TOKENS, max_nodes),
            use_tree_spec=self._drafter.tree,
        )
        tree = DraftTree.from_lists(found.token_ids, found.parents)
        return fitted(tree, max_nodes, max_depth)
