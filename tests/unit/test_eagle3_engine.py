"""A draft head in the engine: the output is that of plain decoding, whatever the head says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deployments.loading import load_engine
from deployments.settings import AppArgs
from tests.support.eagle_heads import head_for, slow_log_p
from tests.support.engines import engine_of, plain, random_prompt, request, run
from tests.support.rank_threads import ranks_of
from tests.support.tiny_models import byte_tokenizer, tiny_model, tiny_target, wrap
from valuspec.cost import LiveCosts
from valuspec.drafting.drafter import Drafter
from valuspec.eagle3.loading import save_head
from valuspec.eagle3.tree import TreeShape
from valuspec.engine.engine import Engine
from valuspec.engine.head_offers import HeadOffers
from valuspec.engine.head_source import Draft, HeadChoice
from valuspec.engine.kv_cache import own_blocks
from valuspec.engine.proposal import keep_by_value
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.errors import ModelError
from valuspec.replay import Trajectory

LAYERS = {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(**LAYERS)


def engine_with(target: Target, draft: Draft, seed: int = 0, **options) -> Engine:
    choice = HeadChoice(head_for(target, seed), draft, TreeShape(6, 3, 40), always=True)
    return engine_of(target, head=choice, **options)


@pytest.mark.parametrize("draft", ["eagle3", "hybrid"])
def test_output_is_that_of_plain_decoding(target, draft) -> None:
    prompts = [random_prompt(seed, 5 + 40 * seed) for seed in range(6)]
    asked = [request(f"r{i}", p, max_tokens=40, ignore_eos=True) for i, p in enumerate(prompts)]
    sampled = [request("s", prompts[0], max_tokens=30, temperature=1.0, seed=7)]
    engine = engine_with(target, draft, max_batch_size=4)
    results = run(engine, [*asked, *sampled])
    assert engine.counters["draft_errors"] == 0
    for r in [*asked, *sampled]:
        assert results[r.request_id].visible == plain(target, r).visible
    assert sum(r.stats.num_draft_tokens for r in results.values()) > 0


def test_a_head_beside_rank_0_of_two() -> None:
    """It drafts there alone, from features that every rank has summed."""
    asked = request("r", random_prompt(1, 45), max_tokens=20, ignore_eos=True)
    with ranks_of(tiny_model("llama", **LAYERS)) as two:
        engine = engine_with(two.target, "eagle3", max_batch_size=1)
        result = run(engine, [asked])["r"]
        assert result.visible == plain(two.target, asked).visible
    assert engine.counters["draft_errors"] == 0
    assert result.stats.num_draft_tokens > 0


def test_requests_that_give_way_and_come_back(target) -> None:
    """Their blocks, and what the head had kept there, go to others in between."""
    asked = [
        request(f"r{i}", random_prompt(i, 50), max_tokens=60, ignore_eos=True) for i in range(5)
    ]
    engine = engine_with(target, "hybrid", max_batch_size=5, kv_tokens=6 * 128)
    results = run(engine, asked)
    assert sum(r.stats.num_preemptions for r in results.values()) > 0
    assert engine.counters["draft_errors"] == 0
    for r in asked:
        assert results[r.request_id].token_ids == plain(target, r).token_ids


def test_the_head_sees_the_features_of_every_token_in_order(target) -> None:
    """After a step the next tree is the one that features computed afresh lead to."""
    prompt = random_prompt(3, 40)
    engine = engine_with(target, "eagle3", max_batch_size=1)
    drafted = []
    asked_for = engine.head_source._drafter.draft

    def listen(places, depths):
        drafted.append(asked_for(places, depths)[0])
        return drafted[-1:]

    engine.head_source._drafter.draft = listen
    output = run(engine, [request("r", prompt, max_tokens=24, ignore_eos=True)])["r"]
    head, context = head_for(target), [*prompt, *output.token_ids]
    target.show_features(head.config.layer_ids)
    counts = [1, *(np.cumsum(output.stats.accepted[:3]) + np.arange(2, 5))]
    for count, draft in zip(counts, drafted, strict=False):
        known = np.array(context[: len(prompt) + count - 1])
        cache = target.new_cache(own_blocks(1, 128))
        target.forward([SequenceRows.chain(0, 0, known)], cache)
        features = target.features[: len(known)]
        log_p = slow_log_p(head, features, context[1 : len(known) + 1], ())
        likeliest = int(log_p.argmax())
        roots = np.flatnonzero(draft.tree.parents < 0)
        best = roots[np.argmax(draft.probability[roots])]
        assert draft.tree.tokens[best] == likeliest
        assert draft.probability[best] == pytest.approx(float(log_p.exp().max()), rel=1e-2)


def test_features_are_what_the_layers_read() -> None:
    model = tiny_model("llama", **LAYERS)
    prompt = torch.arange(3, 20)
    expected = model(prompt[None], output_hidden_states=True).hidden_states
    target = wrap(model)
    rows = [SequenceRows.chain(0, 0, prompt.numpy())]
    before = target.forward(rows, target.new_cache(own_blocks(1, 64)))
    target.show_features((1, 2, 3))
    after = target.forward(rows, target.new_cache(own_blocks(1, 64)))
    assert torch.equal(before, after)
    seen = target.features[:17].chunk(3, dim=-1)
    for layer, found in zip((1, 2, 3), seen, strict=True):
        assert torch.allclose(found, expected[layer][0], atol=1e-4)


def test_a_head_that_fails_costs_its_drafts_only(target) -> None:
    engine = engine_with(target, "hybrid", max_batch_size=2)

    def broken(*_):
        raise RuntimeError("a head out of order")

    engine.head_source._drafter.draft = broken
    asked = request("r", random_prompt(1, 30), max_tokens=20, ignore_eos=True)
    assert run(engine, [asked])["r"].token_ids == plain(target, asked).token_ids
    assert engine.counters["draft_errors"] > 0


def test_a_draft_is_left_out_while_it_does_not_pay(target) -> None:
    choice = HeadChoice(head_for(target), "hybrid", TreeShape(4, 2, 16))
    engine = engine_of(target, head=choice, max_batch_size=1, node_filter=keep_by_value)
    head = engine.head_source
    calls = []
    drafts = head._drafter.draft
    head._drafter.draft = lambda *args: calls.append(1) or drafts(*args)
    head._added[:], head._seconds = 0.0, 10.0  # brings nothing, takes seconds
    asked = request("r", random_prompt(1, 30), max_tokens=40, ignore_eos=True)
    result = run(engine, [asked])["r"]
    assert result.token_ids == plain(target, asked).token_ids
    assert 0 < len(calls) <= result.stats.num_steps // 16 + 1


def test_a_draft_that_took_long_once_is_not_held_against_the_others(target) -> None:
    """The first one compiles what it runs."""
    choice = HeadChoice(head_for(target), "hybrid", TreeShape(4, 2, 16))
    head = engine_of(target, head=choice, max_batch_size=1).head_source
    for seconds, expected in ((10.0, 0.0), (0.004, 0.004), (0.005, 0.005), (9.0, 0.005)):
        head._learn_seconds(seconds)
        assert head._seconds == expected
    for _ in range(15):
        head._learn_seconds(0.02)
    assert head._seconds == 0.02


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ModelError, match="Llama, Mistral, Qwen2 or Qwen3"):
        tiny_target("gpt2").show_features((1, 2, 3))


@pytest.mark.parametrize("draft", ["eagle3", "hybrid"])
def test_trees_along_known_answers_are_those_of_serving(target, draft) -> None:
    """What rates are learned from is what they will be used on."""
    prompts = [random_prompt(seed, 20 + 9 * seed) for seed in range(3)]
    engine = engine_with(target, draft, max_batch_size=1)
    served: list[list[tuple[list[int], list[int]]]] = []
    extend = engine.head_source.extend

    def listen(sequences, candidates, depths):
        trees = extend(sequences, candidates, depths)
        served[-1].append((trees[0].tree.tokens.tolist(), trees[0].tree.parents.tolist()))
        return trees

    engine.head_source.extend = listen
    answers, accepted = [], []
    for prompt in prompts:
        served.append([])
        asked = request("r", prompt, max_tokens=24, ignore_eos=True)
        result = run(engine, [asked])["r"]
        accepted.append(result.stats.accepted)
        answers.append(
            Trajectory(np.array(prompt, np.int32), np.array(result.token_ids, np.int32), 24)
        )
        engine.drafter = Drafter()  # answers do not draft for each other here
    choice = HeadChoice(head_for(target), draft, TreeShape(6, 3, 40))
    offers = list(HeadOffers(target, choice, Drafter()).along(answers))
    for trees, counts, offered in zip(served, accepted, offers, strict=True):
        assert len(offered) == 23
        done = 0
        for tree, count in zip(trees, counts, strict=False):
            candidate = offered[done][0]
            assert tree == (candidate.tree.tokens.tolist(), candidate.tree.parents.tolist())
            done += count + 1


def test_a_replica_drafts_with_the_head_it_is_given(tmp_path, monkeypatch) -> None:
    model = tiny_model("llama", **LAYERS)
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    save_head(head_for(wrap(model)), tmp_path / "head")
    monkeypatch.setattr("valuspec.engine.cost_cache.live_costs", lambda *_: LiveCosts({}))
    monkeypatch.setattr("torch.set_num_threads", lambda *_: None)
    args = AppArgs(
        model=str(tmp_path / "target"), dtype="float32", draft="eagle3", exact=False,
        draft_head=str(tmp_path / "head"), max_batch_size=2, kv_cache_tokens=512,
    )  # fmt: skip
    target, engine = load_engine(args)
    assert engine.head_source.alone
    asked = request("r", random_prompt(1, 30), max_tokens=20, ignore_eos=True)
    assert run(engine, [asked])["r"].token_ids == plain(target, asked).token_ids
    assert engine.counters["draft_errors"] == 0
    assert run(engine, [asked])["r"].stats.num_offered_nodes > 0
    with pytest.raises(ModelError, match="hidden size 576; this one has 64"):
        load_engine(args.model_copy(update={"draft_head": None}))
