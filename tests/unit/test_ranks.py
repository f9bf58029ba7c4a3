"""A target split among ranks: what each holds, that their sum is exact, and what a lost one does.

The ranks are threads of this process; their messages and sums go through real pipes and real gloo.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bench.adversary import hidden_truth, random_trees, wrong_trees
from tests.support.engines import Result, engine_of, plain, random_prompt, request, run, scripted
from tests.support.rank_threads import CPU, Ranks, ranks_of
from tests.support.tiny_models import FAMILIES, LEAN, tiny_model, wrap
from valuspec.engine.engine import Engine
from valuspec.engine.kv_cache import BLOCK, KvCache, own_blocks
from valuspec.engine.mirror import Leader
from valuspec.engine.probe import ENVELOPE, choose_exact_mode, probe
from valuspec.engine.ranks import RankGroup
from valuspec.engine.rows import SequenceRows
from valuspec.engine.shards import check_split, take_shard
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest
from valuspec.errors import ModelError, RankLostError

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = np.array(random_prompt(0, 40))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two, of a model whose query heads share keys and whose projections have biases."""
    with ranks_of(tiny_model("llama_bias"), dtype=torch.bfloat16) as two:
        target = two.target
        target.exact_mode, target.min_width = choose_exact_mode(target)
        yield two


# -- what each rank holds


@pytest.mark.parametrize("family", LEAN)
def test_shards_are_a_partition_of_what_the_plan_splits(family) -> None:
    whole = tiny_model(family, num_key_value_heads=4)
    shards = [copy.deepcopy(whole) for _ in range(4)]
    for rank, shard in enumerate(shards):
        take_shard(shard, rank, 4)
    for name, module in whole.model.layers[1].named_modules():
        parts = [shard.model.layers[1].get_submodule(name) for shard in shards]
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            assert torch.equal(torch.cat([p.weight for p in parts]), module.weight)
            if module.bias is not None:
                assert torch.equal(torch.cat([p.bias for p in parts]), module.bias)
        elif name.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat([p.weight for p in parts], dim=1), module.weight)
            assert [p.bias is not None for p in parts] == [module.bias is not None] + [False] * 3
        elif name.endswith("norm"):
            assert all(torch.equal(p.weight, module.weight) for p in parts)
    assert [len(shard.lm_head.weight) for shard in shards] == [len(whole.lm_head.weight), 0, 0, 0]
    assert all(
        torch.equal(s.model.embed_tokens.weight, whole.model.embed_tokens.weight) for s in shards
    )


@pytest.mark.parametrize("family", LEAN)
def test_ranks_together_compute_what_one_does(family) -> None:
    model = tiny_model(family)
    alone = wrap(model)
    rows = [SequenceRows.chain(0, 0, PROMPT)]
    expected = alone.forward(rows, alone.new_cache(own_blocks(1, BLOCK)))
    with ranks_of(model) as two:
        target = two.target
        assert (target.num_heads, target.num_kv_heads) == (2, 1)
        assert target.model_fingerprint == alone.model_fingerprint
        logits = target.forward(rows, target.new_cache(own_blocks(1, BLOCK)))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "num_ranks", "message"),
    [
        ("llama", 3, "4 attention heads cannot be split among 3 ranks; .* 1 or 2"),
        ("llama", 4, "2 key-value heads cannot be split among 4 ranks; .* 1 or 2"),
        ("gpt2", 2, "a gpt2 model cannot be split"),
        ("olmo2", 2, "a olmo2 model cannot be split"),
        ("phi", 2, "a phi model cannot be split"),
    ],
)
def test_what_cannot_be_split_is_refused_from_its_configuration(family, num_ranks, message) -> None:
    with pytest.raises(ModelError, match=message):
        check_split(tiny_model(family).config, num_ranks)


def test_every_other_rotary_position_is_refused() -> None:
    class_name, sizes = FAMILIES["llama"]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = AutoConfig.for_model(class_name.removesuffix("Config").lower(), **sizes)
    check_split(config, 2)
    config.rope_parameters = rope
    with pytest.raises(ModelError, match="cannot be split"):
        check_split(config, 2)


# -- exactness


def test_a_sum_over_ranks_does_not_depend_on_how_many_rows_there_are(tmp_path) -> None:
    torch.manual_seed(0)
    partial = torch.randn(3, 37, 24).to(torch.bfloat16)
    sums: dict[int, list[torch.Tensor]] = {}

    def add(rank: int) -> None:
        group = RankGroup(tmp_path / "meeting", rank, 3, CPU)
        sums[rank] = [group.sum(partial[rank, :n]) for n in (37, 8, 5, 1)]

    threads = [threading.Thread(target=add, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_order = (partial[0].float() + partial[1].float() + partial[2].float()).to(torch.bfloat16)
    for of_rank in sums.values():
        for found in of_rank:
            assert torch.equal(found, in_order[: len(found)])


def test_the_probe_runs_over_all_ranks(ranks, monkeypatch) -> None:
    assert ranks.target.exact_mode in ("rows", "envelope")
    # It notices what goes wrong on another rank alone.
    attention = ranks.targets[1].attention
    ranks.targets[1].attention = lambda rows, cache: attention(
        replace(rows, slots=np.maximum(0, rows.slots - (rows.num_rows > 1))), cache
    )
    found = probe(ranks.target)
    ranks.targets[1].attention = attention
    assert found.rows_equal < found.rows_checked
    assert probe(ranks.target).exact


def test_every_forward_has_the_width_of_rank_0(ranks, monkeypatch) -> None:
    monkeypatch.setattr(ranks.target, "min_width", ENVELOPE)
    forwards(ranks.target, 1)
    assert ranks.targets[1].min_width == ENVELOPE


def cases(target: Target) -> tuple[list[GenerationRequest], dict[str, Result]]:
    """Greedy and seeded requests, and what each is answered alone and without speculation."""
    asked = []
    for n in range(4):
        draws = {"temperature": 0.9, "seed": n} if n % 2 else {"temperature": 0.0}
        prompt = random_prompt(n, 90 + 9 * n)  # the answers go past a block's end
        asked.append(request(f"r{n}", prompt, max_tokens=40, ignore_eos=True, **draws))
    return asked, {r.request_id: plain(target, r) for r in asked}


def speculating(target: Target, asked: list[GenerationRequest], alone: dict[str, Result]) -> Engine:
    """An engine with a batch of three, whose drafts hold right tokens among wrong ones."""
    futures = {r.prompt_ids: alone[r.request_id].token_ids for r in asked}
    drafter = scripted(target, futures, random_trees, wrong_trees, hidden_truth, hidden_truth)
    return engine_of(target, drafter, max_batch_size=3)


def test_answers_do_not_depend_on_speculation_or_company(ranks) -> None:
    asked, alone = cases(ranks.target)
    together = run(speculating(ranks.target, asked, alone), asked)
    for name, result in together.items():
        assert result.visible == alone[name].visible
    assert sum(result.num_accepted for result in together.values()) > 20


def test_another_rank_must_move_what_rank_0_moves(ranks, monkeypatch) -> None:
    """The test above is able to fail."""
    asked, alone = cases(ranks.target)
    move = KvCache.move
    monkeypatch.setattr(
        KvCache, "move", lambda cache, *cells: hasattr(cache, "key") and move(cache, *cells)
    )
    together = run(speculating(ranks.target, asked, alone), asked)
    assert any(result.visible != alone[name].visible for name, result in together.items())


def test_three_ranks_agree_as_two_do() -> None:
    model = tiny_model("qwen3", num_attention_heads=6, num_key_value_heads=3)
    with ranks_of(model, 3, dtype=torch.bfloat16) as three:
        three.target.exact_mode, three.target.min_width = choose_exact_mode(three.target)
        assert three.target.exact


def test_a_cache_ends_on_all_ranks(ranks, monkeypatch) -> None:
    rows = [SequenceRows.chain(0, 0, PROMPT)]
    held: weakref.WeakSet[KvCache] = weakref.WeakSet()
    new_cache = Target.new_cache

    def watched(target: Target, *arguments: Any) -> KvCache:
        cache = new_cache(target, *arguments)
        if target is ranks.targets[1]:
            held.add(cache)
        return cache

    monkeypatch.setattr(Target, "new_cache", watched)
    for _ in range(3):  # with the next message, the others give up what rank 0 has dropped
        ranks.target.forward(rows, ranks.target.new_cache(own_blocks(1, BLOCK)))
        assert len(held) == 1


# -- ranks that are lost


class Faulty:
    """A channel whose owner does something else after so many messages."""

    def __init__(self, channel: Connection, after: int, instead: Callable[[], None]) -> None:
        self._channel, self._left, self._instead = channel, after, instead
        self.send_bytes, self.close = channel.send_bytes, channel.close

    def recv_bytes(self) -> bytes:
        self._left -= 1
        if self._left < 0:
            self._instead()
        return self._channel.recv_bytes()


def _die() -> None:
    raise ValueError("this rank dies")


def forwards(target: Target, number: int) -> None:
    cache = target.new_cache(own_blocks(1, BLOCK))
    for position in range(number):
        target.forward([SequenceRows.chain(0, position, PROMPT[:1])], cache)


def test_a_dead_rank_ends_the_target() -> None:
    lost: list[RankLostError] = []
    with ranks_of(tiny_model("llama"), through=lambda c: Faulty(c, 4, _die)) as two:
        two.leader.on_loss = lost.append
        with pytest.raises(RankLostError, match="no longer work together") as first:
            forwards(two.target, 6)
        for thread in two.threads:
            thread.join()
        assert [str(error) for error in two.errors] == ["this rank dies"]
        with pytest.raises(RankLostError) as second:
            forwards(two.target, 1)
    assert lost == [first.value]
    assert second.value is first.value


def test_a_hung_rank_ends_the_target() -> None:
    released = threading.Event()
    hung = {"timeout_s": 0.5, "through": lambda c: Faulty(c, 4, released.wait)}
    with ranks_of(tiny_model("llama"), **hung) as two:
        with pytest.raises(RankLostError, match=r"[Tt]imed out"):
            forwards(two.target, 6)
        released.set()


def test_a_forward_that_fails_on_rank_0_alone_ends_the_target(monkeypatch) -> None:
    """The other rank is in the midst of it: what it sums next would meet another forward's sums."""
    with ranks_of(tiny_model("llama"), timeout_s=0.5) as two:
        forwards(two.target, 1)
        monkeypatch.setattr(two.target.decoder, "norm", None)
        with pytest.raises(RankLostError):
            forwards(two.target, 1)
        monkeypatch.undo()
        with pytest.raises(RankLostError):
            forwards(two.target, 1)


def test_rows_that_rank_0_refuses_reach_nobody(ranks) -> None:
    cache = ranks.target.new_cache(own_blocks(1, BLOCK))
    deep = SequenceRows(0, 0, np.zeros(20, np.int64), np.array([-1, -1, *range(1, 19)]))
    with pytest.raises(ValueError, match="deeper"):
        ranks.target.forward([deep], cache)
    forwards(ranks.target, 1)


def test_other_weights_on_another_rank_are_refused() -> None:
    ours, theirs = Pipe()
    theirs.send_bytes(b"other")
    with pytest.raises(ModelError, match="different weights: mine on rank 0, other on another"):
        Leader([ours]).await_others("mine")


def test_a_rank_that_ends_while_loading_is_reported() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(RankLostError):
        Leader([ours]).await_others("mine")
