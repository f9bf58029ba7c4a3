"""Put the filter behind a draft tree of your own: a suffix tree that knows nothing of ValuSpec.

    python examples/filter_foreign_trees.py

The drafter below is the kind other frameworks have: it counts what followed the last tokens in
earlier answers and proposes everything that ever did, with count ratios for probabilities. Here
is all that joins the two:

1. `learn_thresholds`: trees drafted along answers whose continuation is known, and what a forward
   costs, give transfer rates and thresholds.
2. `filter_tree`: every later tree goes through it before the target verifies it.

The target is a stand-in, made-up answers, so that this runs in seconds without a model: greedy
answers are known, hence what any tree would have had accepted, and the cost gives the time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from valuspec import CostStaircase, ThresholdSet, filter_tree, learn_thresholds

Tree = tuple[list[int], list[int], list[float]]
"""(tokens, parents, probability given the parent)."""

#: Seconds of a forward of SmolLM2-135M on two cores; measure yours with `CostStaircase.measure`.
COST = CostStaircase((1, 4, 8, 16, 32, 64), (0.022, 0.023, 0.026, 0.034, 0.053, 0.089))


class SuffixDrafter:
    """The foreign drafter: what followed the last two tokens, or the last one, `depth` deep."""

    def __init__(self, answers: Sequence[Sequence[int]], depth: int = 5, nodes: int = 48) -> None:
        self.depth, self.nodes = depth, nodes
        self.followed: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for answer in answers:
            for end in range(1, len(answer)):
                for length in (1, 2):
                    key = tuple(answer[max(0, end - length) : end])
                    self.followed[key][answer[end]] = self.followed[key].get(answer[end], 0) + 1

    def draft(self, context: Sequence[int]) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        probability: list[float] = []
        level = [(-1, tuple(context[-2:]))]
        for _ in range(self.depth):
            grown = []
            for parent, key in level:
                counts = self.followed.get(key) or self.followed.get(key[-1:]) or {}
                total = sum(counts.values())
                for token, count in sorted(counts.items(), key=lambda item: -item[1])[:4]:
                    if len(tokens) == self.nodes:
                        return tokens, parents, probability
                    grown.append((len(tokens), (*key[-1:], token)))
                    tokens.append(token)
                    parents.append(parent)
                    probability.append(count / total)
            level = grown
        return tokens, parents, probability


def made_up_answers(count: int, seed: int) -> list[list[int]]:
    """Answers with the repetition real ones have: stock phrases, some words between them."""
    phrases = [[random.Random(i).randrange(400) for _ in range(3 + i % 9)] for i in range(40)]
    rng = random.Random(seed)
    answers = []
    for _ in range(count):
        answer: list[int] = []
        while len(answer) < 100:
            answer += phrases[min(int(rng.expovariate(0.12)), 39)]
            answer += [rng.randrange(400) for _ in range(rng.randrange(3))]
        answers.append(answer)
    return answers


def tokens_per_second(
    answers: Sequence[Sequence[int]], drafter: SuffixDrafter, keep: Callable[[Tree], Sequence[int]]
) -> float:
    """Decode known answers: each step verifies what `keep` leaves of the tree."""
    table, seconds, tokens = COST.table(65), 0.0, 0
    for answer in answers:
        done = 1
        while done < len(answer):
            tree = drafter.draft(answer[:done])
            kept = keep(tree)
            seconds += table[len(kept)]
            gained = 1 + accepted(tree, kept, answer[done:])
            tokens += min(gained, len(answer) - done)
            done += gained
    return tokens / seconds


def accepted(tree: Tree, kept: Sequence[int], future: Sequence[int]) -> int:
    """Nodes the target accepts."""
    node, depth = -1, 0
    for index in kept:
        if depth < len(future) and (tree[1][index], tree[0][index]) == (node, future[depth]):
            node, depth = index, depth + 1
    return depth


def main() -> dict[str, float]:
    drafter = SuffixDrafter(made_up_answers(60, seed=1))

    def known_steps(answer: Sequence[int]):  # type: ignore[no-untyped-def]
        for done in range(1, len(answer)):
            tokens, parents, probability = drafter.draft(answer[:done])
            yield tokens, parents, {"probability": probability}, answer[done:]

    thresholds: ThresholdSet = learn_thresholds(
        (known_steps(answer) for answer in made_up_answers(40, seed=2)), {1: COST}
    )

    def filtered(tree: Tree) -> Sequence[int]:
        tokens, parents, probability = tree
        kept, _ = filter_tree(tokens, parents, {"probability": probability}, thresholds)
        return np.asarray(kept).tolist()

    tests = made_up_answers(20, seed=3)
    speeds = {
        "no drafts": tokens_per_second(tests, drafter, lambda tree: []),
        "the whole tree": tokens_per_second(tests, drafter, lambda tree: range(len(tree[0]))),
        "filtered": tokens_per_second(tests, drafter, filtered),
    }
    for name, speed in speeds.items():
        print(f"{name:<16}{speed:7.1f} tokens/s")
    return speeds


if __name__ == "__main__":
    main()
