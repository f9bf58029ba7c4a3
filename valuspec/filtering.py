"""The filter for other people's trees: arrays in, kept indices and values out.

Nothing here knows how a tree was made, or verifies one. A framework that drafts trees hands each to
`filter_tree` before it verifies it, and now and then learns rates and thresholds from trees whose
outcome it knows, with `learn_thresholds`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec.calibration import calibrate_drafted
from valuspec.cost import CostStaircase
from valuspec.drafted import Drafted
from valuspec.errors import InvalidTreeError
from valuspec.evidence import CandidateTree, Evidence
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree
from valuspec.valuation import select, values

Array = Any
"""A numpy array, a torch tensor on any device, or a sequence of numbers."""
KnownStep = tuple[Array, Array, Mapping[str, Array], Sequence[int]]
"""(tokens, parents, evidence, the tokens the target went on with) at one output position."""

#: What an edge is taken for where nothing is said: not seen anywhere, no draft model asked.
_UNKNOWN: dict[str, tuple[type[np.generic], float]] = {
    "sources": (np.int32, 0),
    "match_length": (np.int32, 0),
    "occurrences": (np.int32, 0),
    "parent_occurrences": (np.int32, 0),
    "share": (np.float32, 0.0),
    "own_share": (np.float32, np.nan),
    "probability": (np.float32, np.nan),
    "rank": (np.int32, 0),
}


class Filtered(NamedTuple):
    """Of the library the tokens came in.

    kept:   int64 [num_kept], ascending; with every node its ancestors are kept
    values: float32 [num_nodes], estimated probability that verification reaches each node
    """

    kept: Array
    values: Array


def filter_tree(
    tokens: Array,
    parents: Array,
    evidence: Mapping[str, Array],
    thresholds: ThresholdSet,
    *,
    batch_size: int = 1,
    max_nodes: int = 64,
) -> Filtered:
    """Choose the nodes of a draft tree that are worth verifying.

    tokens:     [num_nodes] token ids
    parents:    [num_nodes], an earlier node, or -1 for children of the context
    evidence:   fields of `Evidence` by name, [num_nodes] each: `probability` and `rank` of a draft
                model, or `share`, `parent_occurrences` and `match_length` of earlier text, or both
    batch_size: requests verified together
    max_nodes:  most nodes kept
    Raises InvalidTreeError for arrays that are no tree, or evidence that does not fit it.
    """
    candidate = _candidate(tokens, parents, evidence)
    value = values(candidate, thresholds)
    kept = select(value, thresholds, batch_size=batch_size, max_nodes=max_nodes)
    return Filtered(_like(tokens, kept.astype(np.int64)), _like(tokens, value))


def learn_thresholds(
    trajectories: Iterable[Iterable[KnownStep]],
    costs: Mapping[int, CostStaircase],
    *,
    draft_s: float = 0.0,
    model_fingerprint: str = "",
    provenance: Mapping[str, Any] | None = None,
) -> ThresholdSet:
    """Learn from trees drafted along greedy answers whose continuation is known.

    trajectories: per answer, one step for every output position after the first
    costs:        seconds of a verification, by largest batch size; measure with
                  `CostStaircase.measure`
    draft_s:      seconds it takes to draft a tree
    Raises ThresholdError when there is too little to learn from.
    """
    offers = (
        [
            (_candidate(tokens, parents, evidence), np.asarray(future, np.int32))
            for tokens, parents, evidence, future in steps
        ]
        for steps in trajectories
    )
    return calibrate_drafted(
        Drafted.of_offers(offers, draft_s=draft_s),
        costs,
        model_fingerprint=model_fingerprint,
        provenance=provenance or {},
    )


def _candidate(tokens: Array, parents: Array, evidence: Mapping[str, Array]) -> CandidateTree:
    token_ids, above = _int32(tokens), _int32(parents)
    size = len(token_ids)
    if len(above) != size:
        raise InvalidTreeError(f"{size} tokens, but {len(above)} parents")
    if size and (above.min() < -1 or np.any(above >= np.arange(size))):
        raise InvalidTreeError("a parent does not precede its child (or is below -1)")
    if unknown := evidence.keys() - _UNKNOWN.keys():
        raise InvalidTreeError(
            f"evidence {sorted(unknown)} is not known; choose from {sorted(_UNKNOWN)}"
        )
    tree = DraftTree(token_ids, above, np.ones(size, np.int32))
    fields: dict[str, NDArray[Any]] = {"depth": tree.depths()}
    for name, (dtype, default) in _UNKNOWN.items():
        given = evidence.get(name)
        field = np.full(size, default, dtype) if given is None else _host(given).astype(dtype)
        if field.shape != (size,):
            raise InvalidTreeError(f"{name} has shape {field.shape}; ({size},) expected")
        fields[name] = field
    return CandidateTree(tree, Evidence(**fields))


def _host(array: Array) -> NDArray[Any]:
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.float().numpy() if array.is_floating_point() else array.numpy()
    return np.asarray(array)


def _int32(array: Array) -> NDArray[np.int32]:
    return _host(array).astype(np.int32)


def _like(example: Array, array: NDArray[Any]) -> Array:
    """The array, in the library and on the device of `example`."""
    if not hasattr(example, "detach"):
        return array
    return sys.modules["torch"].from_numpy(array).to(example.device)
