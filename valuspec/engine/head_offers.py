"""The trees a draft head would have proposed along known answers: what rates are learned from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from valuspec.drafted import Offer
from valuspec.drafting.drafter import MAX_DEPTH, Drafter
from valuspec.drafting.eagle3 import merge
from valuspec.eagle3.drafter import HeadDrafter
from valuspec.engine.head_source import HeadChoice
from valuspec.engine.kv_cache import own_blocks
from valuspec.engine.proposal import MAX_TREE_NODES
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.replay import Trajectory

TOGETHER = 16
"""Answers drafted for at a time."""
CHUNK = 256


@dataclass(slots=True)
class HeadOffers:
    """Drafts at every output position of answers. The target's and the head's arithmetic is that
    of serving, so are the trees.

    drafter: what occurred before, to merge with where the choice is hybrid
    """

    target: Target
    choice: HeadChoice
    drafter: Drafter
    num_drafts: int = 0
    seconds: float = 0.0
    """What the drafts took, all together."""

    def along(self, trajectories: Sequence[Trajectory]) -> Iterator[list[Offer]]:
        """Per answer the candidate trees, and what the target went on with."""
        for start in range(0, len(trajectories), TOGETHER):
            yield from self._group(trajectories[start : start + TOGETHER])

    @property
    def draft_s(self) -> float:
        """Seconds of a draft for one request, in groups."""
        return self.seconds / max(1, self.num_drafts)

    def _group(self, trajectories: Sequence[Trajectory]) -> list[list[Offer]]:
        longest = max(len(t.prompt_ids) + len(t.output_ids) for t in trajectories)
        tables = own_blocks(len(trajectories), longest + MAX_TREE_NODES)
        head = HeadDrafter(self.choice.head, tables, int(tables.max()) + 1, self.choice.shape)
        features = [self._features(t) for t in trajectories]
        sessions = [self.drafter.start(t.namespace, t.prompt_ids) for t in trajectories]
        for session, trajectory in zip(sessions, trajectories, strict=True):
            session.add_retrieved(trajectory.retrieved)
            session.extend(trajectory.output_ids[:1])
        offers: list[list[Offer]] = [[] for _ in trajectories]
        known = [0] * len(trajectories)
        for done in range(1, max(len(t.output_ids) for t in trajectories)):
            active = [i for i, t in enumerate(trajectories) if done < len(t.output_ids)]
            depths = []
            for i in active:
                trajectory = trajectories[i]
                end = len(trajectory.prompt_ids) + done - 1  # features of what is computed
                tokens = np.concatenate([trajectory.prompt_ids, trajectory.output_ids])
                following = tokens[known[i] + 1 : end + 1].astype(np.int64)
                head.observe(i, known[i], features[i][known[i] : end], following)
                known[i] = end
                depths.append(min(MAX_DEPTH, trajectory.max_tokens - done - 1))
            able = [(i, depth) for i, depth in zip(active, depths, strict=True) if depth > 0]
            started = time.perf_counter()
            drafts = head.draft([i for i, _ in able], [d for _, d in able]) if able else []
            self.seconds += time.perf_counter() - started
            self.num_drafts += len(able)
            by_place = dict(zip((i for i, _ in able), drafts, strict=True))
            for i, depth in zip(active, depths, strict=True):
                future = trajectories[i].output_ids[done:]
                candidate = sessions[i].propose(MAX_TREE_NODES, max(0, depth))
                if i in by_place:
                    alone = self.choice.draft == "eagle3"
                    draft = by_place[i]
                    candidate = draft.candidate() if alone else merge(candidate, draft)
                offers[i].append((candidate, future))
                sessions[i].extend(future[:1])
        return offers

    def _features(self, trajectory: Trajectory) -> torch.Tensor:
        """Of all tokens but the last, [num_tokens - 1, 3 * hidden]."""
        tokens = np.concatenate([trajectory.prompt_ids, trajectory.output_ids[:-1]])
        self.target.show_features(self.choice.head.config.layer_ids)
        cache = self.target.new_cache(own_blocks(1, len(tokens)))
        seen = []
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK].astype(np.int64)
            rows = [SequenceRows.chain(0, start, chunk)]
            self.target.forward(rows, cache, np.zeros(1, np.int64))
            features = self.target.features
            if features is not None:
                seen.append(features[: len(chunk)].clone())
        return torch.cat(seen)
