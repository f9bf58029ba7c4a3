"""Replay against a slow, obvious decoder that follows the same trajectory token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trajectories import COST, SLOPED, behind_long_prompts, markov_answers, stocked
from valuspec.cost import CONTEXT
from valuspec.drafting.drafter import MAX_DEPTH, Drafter
from valuspec.evidence import CandidateTree, Evidence
from valuspec.replay import (
    Select,
    Trajectory,
    filtered,
    labels,
    longest_match,
    most_frequent,
    oracle,
    plain,
    replay,
    steps,
    unfiltered,
)
from valuspec.thresholds import ThresholdSet
from valuspec.tree import DraftTree

THRESHOLDS = ThresholdSet.starting("any model")
EOS = 0


def obvious_steps(
    trajectory: Trajectory, drafter: Drafter, select: Select
) -> list[tuple[int, int]]:
    """(kept nodes, accepted nodes) per step, with a walk over a dictionary of children."""
    answer = trajectory.output_ids.tolist()
    session = drafter.start(trajectory.namespace, trajectory.prompt_ids)
    session.add_retrieved(trajectory.retrieved)
    session.extend(answer[:1])
    produced, result = answer[:1], []
    while len(produced) < len(answer):
        depth = min(MAX_DEPTH, trajectory.max_tokens - len(produced) - 1)
        candidate = session.propose(64, depth)
        rest = answer[len(produced) :]
        kept = select(candidate, np.array(rest, np.int32)).tolist()
        tree = candidate.tree
        children = {(int(tree.parents[n]), int(tree.tokens[n])): n for n in kept}
        node, new = -1, []
        for token in rest:
            new.append(token)
            node = children.get((node, token), -2)
            if node == -2:  # the target's own token ends the step
                break
        accepted = len(new) - (1 if node == -2 else 0)
        result.append((len(kept), accepted))
        session.extend(new)
        produced += new
    return result


SELECTS: dict[str, Select] = {
    "plain": plain,
    "unfiltered": unfiltered,
    "oracle": oracle,
    "filtered": filtered(THRESHOLDS),
    "frequency": most_frequent(12),
    "chain": longest_match(5),
}


@pytest.mark.parametrize("name", SELECTS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), eos_at=st.integers(1, 60), limit=st.integers(0, 3))
def test_steps_are_those_of_an_obvious_decoder(
    name: str, seed: int, eos_at: int, limit: int
) -> None:
    history, test = markov_answers(5, seed), markov_answers(1, seed + 1)[0]
    output = np.append(test.output_ids[:eos_at], np.int32(EOS))
    retrieved = (DraftTree.from_paths([h.output_ids.tolist() for h in history[:2]]),)
    test = replace(test, output_ids=output, max_tokens=len(output) + limit, retrieved=retrieved)
    history.append(replace(test, output_ids=output[-4:]))  # so that the end is drafted too
    drafter = stocked(history)
    replayed = [(len(s.kept), s.num_accepted) for s in steps(test, drafter, SELECTS[name])]
    assert replayed == obvious_steps(test, drafter, SELECTS[name])


@pytest.mark.parametrize("name", SELECTS)
def test_every_output_token_is_counted_once(name: str) -> None:
    tests = markov_answers(4, 5)
    tally = replay(tests, stocked(markov_answers(20, 1)), SELECTS[name], COST)
    assert tally.num_tokens == sum(len(t.output_ids) - 1 for t in tests)
    assert tally.num_steps + tally.num_accepted_tokens >= tally.num_tokens


def test_plain_decoding_costs_one_row_a_token() -> None:
    tests = markov_answers(3, 5)
    tally = replay(tests, stocked(markov_answers(20, 1)), plain, COST)
    assert tally.num_draft_tokens == tally.num_accepted_tokens == 0
    assert tally.tok_s == pytest.approx(1 / COST.seconds[0])
    assert tally.mean_acceptance_length == 1.0


def test_whoever_drafts_pays_for_it_in_every_step() -> None:
    tests, drafter = markov_answers(3, 5), stocked(markov_answers(20, 1))
    dear = replace(COST, drafting=0.004)
    for name, select in SELECTS.items():
        free, paid = (replay(tests, drafter, select, cost) for cost in (COST, dear))
        more = 0.0 if name == "plain" else 0.004 * free.num_steps
        assert paid.seconds == pytest.approx(free.seconds + more), name


def test_a_candidate_knows_how_many_tokens_lie_before_it() -> None:
    """Prompt and output, whatever the candidate: what a forward costs depends on them."""
    drafter = stocked(markov_answers(20, 1))
    for answer in behind_long_prompts(markov_answers(3, 5)):
        before = len(answer.prompt_ids) + 1
        for step in steps(answer, drafter, SELECTS["filtered"]):
            assert step.candidate.context == before
            before += step.num_tokens
        plainly = replay([answer], drafter, plain, SLOPED)
        contexts = len(answer.prompt_ids) + 1 + np.arange(len(answer.output_ids) - 1)
        beyond = np.maximum(0, contexts - CONTEXT).sum()
        near = SLOPED.seconds[0] * len(contexts)
        assert plainly.seconds == pytest.approx(near + 3e-5 * beyond)  # of a token, of one row


def test_the_oracle_verifies_what_is_accepted_and_nothing_else() -> None:
    tests, drafter = markov_answers(3, 5), stocked(markov_answers(20, 1))
    best = replay(tests, drafter, oracle, COST)
    everything = replay(tests, drafter, unfiltered, COST)
    assert best.num_draft_tokens == best.num_accepted_tokens
    assert best.num_steps == everything.num_steps
    for name in ("plain", "unfiltered", "filtered", "frequency", "chain"):
        assert best.tok_s >= replay(tests, drafter, SELECTS[name], COST).tok_s


def test_drafts_stay_within_the_token_limit() -> None:
    test = replace(markov_answers(1, 5)[0], max_tokens=60)
    for step in steps(test, stocked(markov_answers(20, 1)), unfiltered):
        depths = step.candidate.evidence.depth
        assert depths.max(initial=0) <= max(0, len(step.future) - 1)


def test_a_trajectory_never_sees_its_future() -> None:
    """Two answers that part at token 30 have equal candidates up to there."""
    one = markov_answers(1, 5)[0]
    other = replace(one, output_ids=np.append(one.output_ids[:30], np.full(30, 39, np.int32)))
    drafter = stocked(markov_answers(20, 1))
    offered = [
        {60 - len(s.future): s.candidate.tree.tokens.tolist() for s in steps(t, drafter, plain)}
        for t in (one, other)
    ]
    assert all(offered[0][done] == offered[1][done] for done in range(1, 31))
    assert any(offered[0][done] != offered[1][done] for done in range(32, 60))


def test_a_frozen_store_learns_nothing_and_a_live_one_does() -> None:
    tests = markov_answers(3, 5)
    frozen = stocked([])
    first = replay(tests, frozen, unfiltered, COST)
    assert replay(tests, frozen, unfiltered, COST).num_steps == first.num_steps
    live = stocked([])
    replay(tests, live, unfiltered, COST, remember=True)
    assert replay(tests, live, unfiltered, COST).num_steps < first.num_steps


def test_distractors_from_other_workloads_cost_little() -> None:
    """A store mixed with answers of another source: the filter keeps most of the gain, while the
    unfiltered tree loses more."""
    tests, own = markov_answers(8, 5), markov_answers(30, 1)
    rng = np.random.default_rng(7)
    distractors = [
        replace(t, output_ids=rng.permutation(t.output_ids)) for t in markov_answers(60, 2)
    ]
    pure, mixed = stocked(own), stocked([*own, *distractors])
    loss = {
        name: 1 - replay(tests, mixed, SELECTS[name], COST).tok_s
        / replay(tests, pure, SELECTS[name], COST).tok_s
        for name in ("filtered", "unfiltered")
    }  # fmt: skip
    assert loss["filtered"] < 0.15
    assert loss["unfiltered"] > loss["filtered"]


# -- labels and choices on one tree ---------------------------------------------------------------


def candidate(paths: list[list[int]]) -> CandidateTree:
    tree = DraftTree.from_paths(paths)
    return CandidateTree(tree, Evidence.of_tree(tree))


def test_edges_under_a_wrong_parent_are_not_labelled() -> None:
    reached, taken = labels(candidate([[1, 2, 3], [1, 4, 5], [6, 7]]), [1, 4, 9])
    #                  nodes: 1, 2, 3, 4, 5, 6, 7
    assert reached.tolist() == [True, True, False, True, True, True, False]
    assert taken.tolist() == [True, False, False, True, False, False, False]


def test_edges_past_the_end_of_the_answer_are_not_labelled() -> None:
    reached, taken = labels(candidate([[1, 2, 3], [4]]), [1, 2])
    #                  nodes: 1, 2, 3, 4
    assert reached.tolist() == [True, True, False, True]
    assert taken.tolist() == [True, True, False, False]
    reached, _ = labels(candidate([[1, 2]]), [])
    assert not reached.any()


def test_choices_of_the_simple_policies() -> None:
    tree = candidate([[1, 2, 3]] * 3 + [[1, 5, 6]] * 4 + [[7]])
    future = np.array([1, 2, 9], np.int32)
    #      nodes: 1, 2, 3, 5, 6, 7
    assert oracle(tree, future).tolist() == [0, 1]
    assert longest_match(2)(tree, future).tolist() == [0, 3]
    assert most_frequent(3)(tree, future).tolist() == [0, 3, 4]
    assert unfiltered(tree, future).tolist() == [0, 1, 2, 3, 4, 5]
