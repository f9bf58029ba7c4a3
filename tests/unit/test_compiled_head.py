"""The compiled steps of a draft head against the slow one in fp64, and against themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.eagle_heads import random_head, slow_log_p
from valuspec.drafting.eagle3 import HeadDraft
from valuspec.eagle3.compiled_head import CompiledHead
from valuspec.eagle3.drafter import HeadDrafter
from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.plain_head import PlainHead
from valuspec.eagle3.tree import TreeShape
from valuspec.engine import tile_kernels
from valuspec.engine.kv_cache import BLOCK, own_blocks
from valuspec.engine.program import Program, Step
from valuspec.engine.row_kernels import RowsTop, entry

pytestmark = [
    pytest.mark.usefixtures("threads_of_torch"),
    pytest.mark.skipif(not tile_kernels.supported(), reason="oneDNN is faster on this processor"),
]

OPTIONS: list[tuple[dict[str, bool], float]] = [
    ({}, 0.05),
    ({"norm_before_residual": True}, 0.1),
    ({"norm_before_fc": True, "norm_output": True}, 0.15),
    ({"qk_norm": True, "attention_bias": True}, 0.45),
]
"""And how far log probabilities in bf16, torch's as well, are from those in fp64."""


def head_in_bf16(seed: int, **options: Any) -> DraftHead:
    """Sizes that fill whole units of tiles."""
    head = random_head(seed, draft_vocab_size=32, **options).to(torch.bfloat16)
    head.embedding = head.embedding.to(torch.bfloat16)
    assert CompiledHead.takes(head)
    return head


def context(seed: int, length: int) -> tuple[torch.Tensor, list[int]]:
    torch.manual_seed(seed)
    features = torch.randn(length, 96).to(torch.bfloat16)
    return features, torch.randint(0, 60, (length,)).tolist()


def drafter_of(head: DraftHead, shape: TreeShape, num_slots: int = BLOCK) -> HeadDrafter:
    tables = own_blocks(3, num_slots)
    drafter = HeadDrafter(head, tables, tables.size, shape)
    assert isinstance(drafter._steps, CompiledHead)
    return drafter


def observe(
    drafter: HeadDrafter, place: int, features: torch.Tensor, tokens: Sequence[int], *cuts: int
) -> None:
    for first, end in itertools.pairwise([0, *cuts, len(tokens)]):
        drafter.observe(place, first, features[first:end], np.array(tokens[first:end]))


def paths_of(draft: HeadDraft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tree.tokens.tolist(), draft.tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def same(draft: HeadDraft, other: HeadDraft) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in (
            (draft.tree.tokens, other.tree.tokens),
            (draft.tree.parents, other.tree.parents),
            (draft.probability, other.probability),
            (draft.rank, other.rank),
        )
    )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("options", "tolerance"), OPTIONS)
def test_probabilities_are_those_of_the_slow_reference(
    options: dict[str, bool], tolerance: float, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    head = head_in_bf16(1, **options)
    known = head.token_ids(torch.arange(32)).tolist()
    contexts = [context(seed, length) for seed, length in enumerate((7, 2))]
    drafter = drafter_of(head, TreeShape(top_k=3, depth=2, total_tokens=100))
    for place, (features, tokens) in enumerate(contexts):
        observe(drafter, place, features, tokens, 1)
    drafts = drafter.draft([0, 1], [9, 9])
    for draft, (features, tokens) in zip(drafts, contexts, strict=True):
        assert len(draft.tree) == 3 + 9 + 9
        for path, probability in zip(paths_of(draft), draft.probability, strict=True):
            log_p = slow_log_p(head, features, tokens, path[:-1])
            expected = float(log_p[known.index(path[-1])])
            assert np.log(probability) == pytest.approx(expected, abs=tolerance)


def test_a_tree_is_the_same_alone_and_in_a_batch_and_in_pieces() -> None:
    """Over a block's edge too."""
    contexts = [context(seed, length) for seed, length in enumerate((BLOCK + 9, 5, 40))]
    shape = TreeShape(top_k=4, depth=3, total_tokens=24)
    together = drafter_of(head_in_bf16(2), shape, 2 * BLOCK)
    for place, (features, tokens) in enumerate(contexts):
        observe(together, place, features, tokens)
    drafts = together.draft([2, 0, 1], [9, 9, 2])
    for place, cuts, max_depth, draft in zip(
        (2, 0, 1), ((3, 20), (100, BLOCK + 1), ()), (9, 9, 2), drafts, strict=True
    ):
        alone = drafter_of(head_in_bf16(2), shape, 2 * BLOCK)
        features, tokens = contexts[place]
        known = 0
        for end in (*cuts, len(tokens)):
            alone.observe(place, known, features[known:end], np.array(tokens[known:end]))
            drafted = alone.draft([place], [max_depth])
            known = end
        assert same(drafted[0], draft)
        assert int(draft.tree.depths().max()) <= max_depth


def test_a_growing_tree_leaves_the_blocks_of_sequences_alone() -> None:
    """Whoever shares them would find its nodes there, and the target has no room for all."""
    features, tokens = context(0, 6)
    drafter = drafter_of(head_in_bf16(3), TreeShape(top_k=10, depth=7, total_tokens=60))
    observe(drafter, 0, features, tokens)
    drafter.draft([0], [9])
    behind = drafter._cache.keys[0, 0, :, :, len(tokens) :]
    assert not behind.any()
    assert not drafter._cache.keys[0, 1:3].any()


def test_more_rows_than_there_was_room_for() -> None:
    features, tokens = context(4, 90)
    shape = TreeShape(top_k=3, depth=1, total_tokens=9)
    pieces = drafter_of(head_in_bf16(4, norm_before_fc=True), shape)
    for first, end in ((0, 1), (1, 20), (20, 90)):
        pieces.observe(0, first, features[first:end], np.array(tokens[first:end]))
        drafted = pieces.draft([0], [9])
    at_once = drafter_of(head_in_bf16(4, norm_before_fc=True), shape)
    observe(at_once, 0, features, tokens)
    assert same(at_once.draft([0], [9])[0], drafted[0])


def test_more_nodes_to_expand_than_there_is_room_for_at_first() -> None:
    """They follow what the step before handed on."""
    shape = TreeShape(top_k=30, depth=2, total_tokens=40)
    contexts = [context(seed, 4 + seed) for seed in range(3)]
    together = drafter_of(head_in_bf16(7), shape)
    for place, (features, tokens) in enumerate(contexts):
        observe(together, place, features, tokens)
    drafts = together.draft([0, 1, 2], [9, 9, 9])
    for place, (features, tokens) in enumerate(contexts):
        alone = drafter_of(head_in_bf16(7), shape)
        observe(alone, place, features, tokens)
        assert same(alone.draft([place], [9])[0], drafts[place])
        assert int(drafts[place].tree.depths().max()) == 3


def test_numbers_out_of_range_are_refused() -> None:
    features, tokens = context(0, 3)
    shape = TreeShape(top_k=2, depth=1, total_tokens=5)
    drafter = drafter_of(head_in_bf16(5), shape)
    observe(drafter, 0, features, [*tokens[:2], 60])
    with pytest.raises(IndexError, match="token id"):
        drafter.draft([0], [9])
    drafter.observe(0, 0, features[:, :90], np.array(tokens))
    with pytest.raises(ValueError, match="features"):
        drafter.draft([0], [9])
    observe(drafter, 0, features, tokens)
    drafter.draft([0], [9])
    steps: Any = drafter._steps
    with pytest.raises(IndexError, match="not computed"):
        steps.expand(np.array([2]), None, None)
    with pytest.raises(ValueError, match="15 times"):
        drafter_of(head_in_bf16(5), TreeShape(depth=16))


def test_a_head_whose_logits_are_not_numbers_drafts_nothing() -> None:
    features, tokens = context(0, 3)
    head = head_in_bf16(6)
    with torch.no_grad():
        head.lm_head.weight[5] = torch.nan
    drafter = drafter_of(head, TreeShape(top_k=2, depth=1, total_tokens=5))
    observe(drafter, 0, features, tokens)
    with pytest.raises(ValueError, match="not numbers"):
        drafter.draft([0], [9])


def test_the_likeliest_of_many_and_of_equal_ones() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (5, 1000)).astype(np.float32)).to(torch.bfloat16)
    logits[3] = logits[3].round()  # few different values
    logits[4] = -1.5
    ids, log_p = likeliest(logits, 10)
    expected = logits.double().log_softmax(-1).numpy()
    for row in range(5):
        order = np.argsort(-expected[row], kind="stable")[:10]
        assert ids[row].tolist() == order.tolist()
        assert log_p[row] == pytest.approx(expected[row, order], rel=1e-5, abs=1e-5)


def likeliest(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    call = np.zeros(1, np.dtype(RowsTop))
    ids = np.empty((len(logits), count), np.int64)
    log_p = np.empty((len(logits), count), np.float32)
    call["logits"], call["num_rows"], call["size"] = logits.data_ptr(), *logits.shape
    call["ids"], call["log_p"], call["count"] = ids.ctypes.data, log_p.ctypes.data, count
    Program([Step(entry(RowsTop), call)]).run(1)
    return ids, log_p


def test_a_head_that_fills_no_whole_units_is_computed_in_torch() -> None:
    head = random_head(7, draft_vocab_size=30).to(torch.bfloat16)
    head.embedding = head.embedding.to(torch.bfloat16)
    assert not CompiledHead.takes(head)
    features, tokens = context(0, 3)
    tables = own_blocks(1, BLOCK)
    drafter = HeadDrafter(head, tables, tables.size, TreeShape(3, 2, 20))
    assert isinstance(drafter._steps, PlainHead)
    observe(drafter, 0, features, tokens)
    drafter.draft([0], [9])[0].tree.validate(vocab_size=60, max_nodes=19, max_depth=3)
    assert isinstance(HeadDrafter(head, tables, 1, TreeShape(3, 2, 20))._steps, PlainHead)
