"""Exact decode simulation on known greedy trajectories: no model, no GPU.

Greedy outputs are known, so what any tree would have had accepted is known without running the
target, and the cost staircase gives the time. The drafter and `keep` are the ones the engine
runs, so steps, kept nodes and accepted counts are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from valuspec import valuation
from valuspec.cost import CostStaircase
from valuspec.drafting.drafter import MAX_DEPTH, Drafter, DraftSession
from valuspec.evidence import CandidateTree
from valuspec.jit import kernel
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

MAX_NODES = 64
"""Most nodes verified in a step, as in the engine."""

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
Select = Callable[[CandidateTree, IntArray], IntArray]
"""(candidate tree, tokens the target goes on with) -> kept node indices. Only an oracle looks at
the second argument."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One greedy answer of the target."""

    prompt_ids: IntArray
    output_ids: IntArray
    """Ends with the end-of-sequence token if the target ended the answer itself."""
    max_tokens: int
    """Most output tokens the request allowed: drafts never reach beyond it."""
    retrieved: tuple[DraftTree, ...] = ()
    namespace: str = "default"


class Step(NamedTuple):
    """One target forward after prefill."""

    candidate: CandidateTree
    future: IntArray
    """What the target goes on with from here to the end of its answer."""
    kept: IntArray
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        """Output tokens of the step: the accepted ones and the target's own, up to the end."""
        return min(self.num_accepted + 1, len(self.future))


@dataclass(slots=True)
class Tally:
    """Sums over replayed steps; rows include the row of the pending token."""

    num_steps: int = 0
    num_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens: int = 0
    num_offered_nodes: int = 0
    seconds: float = 0.0

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + self.num_accepted_tokens / max(1, self.num_steps)

    @property
    def nodes_per_step(self) -> float:
        return self.num_draft_tokens / max(1, self.num_steps)


def steps(
    trajectory: Trajectory, drafter: Drafter, select: Select, *, max_nodes: int = MAX_NODES
) -> Iterator[Step]:
    """Decode one trajectory as the engine would."""
    session = _begin(trajectory, drafter)
    output = trajectory.output_ids
    done = 1
    while done < len(output):
        # The forward adds a token of its own, so the draft may be one shorter than the rest.
        depth = min(MAX_DEPTH, trajectory.max_tokens - done - 1)
        candidate = session.propose(max_nodes, depth)
        future = output[done:]
        kept = select(candidate, future)
        accepted = _accepted(candidate.tree.tokens, candidate.tree.parents, kept, future)
        step = Step(candidate, future, kept, accepted)
        yield step
        session.extend(future[: step.num_tokens])
        done += step.num_tokens


def offers(
    trajectory: Trajectory, drafter: Drafter, *, max_nodes: int = MAX_NODES
) -> Iterator[tuple[CandidateTree, IntArray]]:
    """(candidate tree, what the target goes on with) at every position a step could begin at."""
    session = _begin(trajectory, drafter)
    output = trajectory.output_ids
    for done in range(1, len(output)):
        depth = min(MAX_DEPTH, trajectory.max_tokens - done - 1)
        yield session.propose(max_nodes, depth), output[done:]
        session.extend(output[done : done + 1])


def _begin(trajectory: Trajectory, drafter: Drafter) -> DraftSession:
    """A draft session as it is after prefill, which yields the first token without a draft."""
    session = drafter.start(trajectory.namespace, trajectory.prompt_ids)
    if trajectory.retrieved:
        session.add_retrieved(trajectory.retrieved)
    session.extend(trajectory.output_ids[:1])
    return session


def replay(
    trajectories: Iterable[Trajectory],
    drafter: Drafter,
    select: Select,
    cost: CostStaircase,
    *,
    max_nodes: int = MAX_NODES,
    remember: bool = False,
) -> Tally:
    """Decode trajectories in order and add up.

    remember: let later trajectories draft from earlier ones, as a running replica does. Off, the
    shared store stays as it is, so the order does not matter.
    """
    seconds = cost.table(max_nodes + 1)
    tally = Tally()
    for trajectory in trajectories:
        for step in steps(trajectory, drafter, select, max_nodes=max_nodes):
            tally.num_steps += 1
            tally.num_tokens += step.num_tokens
            tally.num_accepted_tokens += step.num_accepted
            tally.num_draft_tokens += len(step.kept)
            tally.num_offered_nodes += len(step.candidate)
            tally.seconds += seconds[len(step.kept)]
            tally.seconds += cost.extra(1 + len(step.kept), step.candidate.context)
            if select is not plain:
                tally.seconds += cost.drafting
        if remember:
            drafter.remember(trajectory.namespace, trajectory.prompt_ids, trajectory.output_ids)
    return tally


# -- which nodes to keep --------------------------------------------------------------------------


def filtered(
    thresholds: ThresholdSet, *, batch_size: int = 1, max_nodes: int = MAX_NODES
) -> Select:
    """Keep what valuation keeps."""
    return lambda candidate, future: valuation.keep(
        candidate, thresholds, batch_size=batch_size, max_nodes=max_nodes
    )


def plain(candidate: CandidateTree, future: IntArray) -> IntArray:
    """Keep nothing: one token a step."""
    return np.empty(0, np.int32)


def unfiltered(candidate: CandidateTree, future: IntArray) -> IntArray:
    """Keep the whole candidate tree, but no more than the engine verifies."""
    return np.arange(min(len(candidate), MAX_NODES), dtype=np.int32)


def oracle(candidate: CandidateTree, future: IntArray) -> IntArray:
    """Keep exactly the nodes the target will accept: the best any filter of this tree can do."""
    return _path(candidate.tree.tokens, candidate.tree.parents, future)


def most_frequent(size: int) -> Select:
    """Keep the `size` nodes of highest path product of raw conditional frequencies."""

    def select(candidate: CandidateTree, future: IntArray) -> IntArray:
        frequency = candidate.evidence.occurrences / np.maximum(
            candidate.evidence.parent_occurrences, 1
        )
        for node, parent in enumerate(candidate.tree.parents.tolist()):
            if parent >= 0:
                frequency[node] *= frequency[parent]
        order = np.argsort(-frequency, kind="stable")[:size]
        return np.sort(order).astype(np.int32)

    return select


def longest_match(length: int) -> Select:
    """Keep one chain: at each node the child with the longest match, then the highest count."""

    def select(candidate: CandidateTree, future: IntArray) -> IntArray:
        best: dict[int, tuple[int, int, int]] = {}
        parents = candidate.tree.parents.tolist()
        matches = candidate.evidence.match_length.tolist()
        counts = candidate.evidence.occurrences.tolist()
        for node, rank in enumerate(zip(matches, counts, strict=True)):
            best[parents[node]] = max(best.get(parents[node], (0, 0, 0)), (*rank, -node))
        chain: list[int] = []
        node = -1
        while len(chain) < length and node in best:
            node = -best[node][2]
            chain.append(node)
        return np.asarray(chain, np.int32)

    return select


# -- what the target would do ---------------------------------------------------------------------


def labels(
    candidate: CandidateTree, future: Sequence[int] | IntArray
) -> tuple[BoolArray, BoolArray]:
    """(reached, taken), bool [num_nodes] each, for a target that goes on with `future`.

    reached: the node's parent lies on the trajectory, so its edge was put to the test.
    taken:   the node itself lies on it.
    """
    size = len(candidate)
    reached, taken = np.zeros(size, bool), np.zeros(size, bool)
    tree = candidate.tree
    _label(tree.tokens, tree.parents, np.asarray(future, np.int32), reached, taken)
    return reached, taken


@kernel
def _label(
    tokens: IntArray, parents: IntArray, future: IntArray, reached: BoolArray, taken: BoolArray
) -> None:
    node, depth = -1, 0  # deepest node known to lie on the trajectory
    for i in range(tokens.size):
        if parents[i] == node and depth < future.size and tokens[i] == future[depth]:
            taken[i] = True
            node, depth = i, depth + 1
    for i in range(tokens.size):
        reached[i] = parents[i] < 0 or taken[parents[i]]
    # Past the end of the answer nothing was put to the test.
    if depth >= future.size:
        for i in range(tokens.size):
            reached[i] = reached[i] and parents[i] != node


@kernel
def _path(tokens: IntArray, parents: IntArray, future: IntArray) -> IntArray:
    path = np.empty(min(tokens.size, future.size), np.int32)
    node, depth = -1, 0
    for i in range(tokens.size):
        if parents[i] == node and depth < future.size and tokens[i] == future[depth]:
            path[depth] = i
            node, depth = i, depth + 1
    return path[:depth]


@kernel
def _accepted(tokens: IntArray, parents: IntArray, kept: IntArray, future: IntArray) -> int:
    node, depth = -1, 0
    for i in kept:
        if parents[i] == node and depth < future.size and tokens[i] == future[depth]:
            node, depth = i, depth + 1
    return depth
