"""Bit-exactness with a real model in bf16: trees, batches and one-token decoding agree bit for bit.

And the inverse: the same comparison finds differences wherever the recipe is left out, so it is
able to fail.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from bench.common import Prompt
from bench.identity import IdentityCheck
from tests.support import engines
from tests.support.tiny_models import tiny_target
from valuspec.engine import rows as rows_module
from valuspec.engine import tile_kernels
from valuspec.engine.kv_cache import BLOCK, KvCache, own_blocks
from valuspec.engine.probe import choose_exact_mode, prefill, probe, random_tree
from valuspec.engine.rows import NEAR, SequenceRows, build_rows
from valuspec.engine.target import Target
from valuspec.engine.two_zone import TwoZoneAttention
from valuspec.engine.types import SamplingParams
from valuspec.engine.weights import load_model

TEXT = (
    """def intersperse(numbers, delimiter):
    \"\"\"Insert a number between every two elements of the list.\"\"\"
    if not numbers:
        return []
    result = []
    for n in numbers[:-1]:
        result.append(n)
        result.append(delimiter)
    result.append(numbers[-1])
    return result

The first walk is 1 mile, the second 4 miles and the third 3 miles, so 12 - 8 = 4 miles remain.
"""
    * 4
)
PATH = 12
"""Tokens of the trajectory that trees are compared on."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2")


@pytest.fixture(scope="module")
def library_target() -> Target:
    """With oneDNN's products, as on processors that there are no tiles for."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN knows no bf16 on this processor")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tile_kernels, "supported", lambda: False)
        return Target.load("smollm2")


@pytest.fixture(scope="module")
def text(target: Target) -> np.ndarray:
    return np.array(target.encode(TEXT))


def new_cache(target: Target, places: int = 1) -> KvCache:
    return target.new_cache(own_blocks(places, 2 * BLOCK))


def one_by_one(
    target: Target, cache: KvCache, start: int, tokens: np.ndarray, place: int = 0
) -> list[torch.Tensor]:
    """Logits of plain decoding: token after token, one row each."""
    logits = []
    for position, token in enumerate(tokens, start):
        rows = SequenceRows.chain(place, position, np.array([token]))
        logits.append(target.forward([rows], cache)[0])
    return logits


def differing(
    target: Target, start: int, tokens: np.ndarray, *, num_trees: int = 3, seed: int = 0
) -> list[tuple[int, int]]:
    """(tree, depth) of every row on the trajectory that differs from plain decoding in any bit."""
    rng = np.random.default_rng(seed)
    cache = new_cache(target)
    prefill(target, cache, 0, tokens[:start])
    expected = one_by_one(target, cache, start, tokens[start : start + PATH])
    found = []
    for number in range(num_trees):
        path_tokens = tokens[start : start + PATH]
        rows, path = random_tree(rng, start, path_tokens, target.vocab_size, 0)
        logits = target.forward([rows], cache)
        for depth, row in enumerate(path):
            if not torch.equal(logits[row], expected[depth]):
                found.append((number, depth))
    return found


def test_start_up_probe_passes(target: Target) -> None:
    assert target.exact
    result = probe(target, num_trees=6, seed=9)
    assert result.rows_checked > 30
    assert result.exact


@pytest.mark.parametrize("start", [NEAR - 4, BLOCK - 5])
def test_library_products_are_exact_too(
    library_target: Target, text: np.ndarray, start: int
) -> None:
    assert library_target.exact
    assert library_target.min_width >= 4
    assert differing(library_target, start, text) == []


def test_two_zones_are_exact_too(target: Target) -> None:
    """The attention of accelerators, on this processor."""
    assert probe(replace(target, attention=TwoZoneAttention)).exact


@pytest.mark.parametrize(
    "start",
    [1, 3, NEAR - 4, NEAR + 1, BLOCK - PATH - 1, BLOCK - 5, BLOCK, BLOCK + 11],
)
def test_tree_rows_have_the_bits_of_plain_decoding(
    target: Target, text: np.ndarray, start: int
) -> None:
    """Before the near zone is full, on both sides of a block's end, and across it."""
    assert differing(target, start, text) == []


def test_prompt_chunks_have_the_bits_of_plain_decoding(target: Target, text: np.ndarray) -> None:
    tokens = text[:60]
    cache = new_cache(target)
    expected = one_by_one(target, cache, 0, tokens)
    cache = new_cache(target)
    whole = target.forward([SequenceRows.chain(0, 0, tokens)], cache)
    for position, logits in enumerate(expected):
        assert torch.equal(whole[position], logits), position
    first = 0
    cache = new_cache(target)
    for size in (1, 7, 2, 31, 19):
        rows = SequenceRows.chain(0, first, tokens[first : first + size])
        chunk = target.forward([rows], cache)
        assert torch.equal(chunk[-1], expected[first + size - 1])
        first += size


@pytest.mark.parametrize("place", [0, 3, 7])
def test_needle_alone_and_among_batch_mates(target: Target, text: np.ndarray, place: int) -> None:
    """One sequence's tree gives the same bits wherever it sits and whoever is beside it."""
    rng = np.random.default_rng(place)
    start = 40
    tree, _ = random_tree(rng, start, text[start:], target.vocab_size, 0)
    alone = new_cache(target)
    prefill(target, alone, 0, text[:start])
    expected = target.forward([tree], alone)

    cache = new_cache(target, 8)
    lengths = rng.integers(2, 90, 8)
    lengths[place] = start
    for mate, length in enumerate(lengths):
        context = text[:start] if mate == place else rng.integers(0, target.vocab_size, length)
        prefill(target, cache, mate, context)
    for mates in ([], [place - 1], [0, 2, 5], list(range(8))):
        members = []
        for mate in sorted({place, *(m for m in mates if m >= 0)}):
            if mate == place:
                members.append(SequenceRows(place, start, tree.token_ids, tree.parents))
            else:
                context = rng.integers(0, target.vocab_size, NEAR)
                rows, _ = random_tree(rng, int(lengths[mate]), context, target.vocab_size, mate)
                members.append(rows)
        offset = sum(len(m) for m in members if m.sequence < place)
        logits = target.forward(members, cache)
        assert torch.equal(logits[offset : offset + len(tree)], expected), mates


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=14), SamplingParams(max_tokens=14, temperature=1.0, seed=3)],
    ids=["greedy", "seeded"],
)
def test_requests_end_to_end(target: Target, params: SamplingParams) -> None:
    prompts = [
        Prompt(str(i), tuple(target.render_chat([{"role": "user", "content": content}])))
        for i, content in enumerate(["Name three colours.", "Write a haiku.", "What is 3 + 4?"])
    ]
    check = IdentityCheck(target, prompts, params)
    for name in ("cold", "truth", "mixed"):
        tally = check.modes()[name]()
        assert tally.exact, (name, tally)
        assert tally.logit_rows_checked == tally.tokens > 0
    assert max(tally.batch_sizes) >= 4
    assert tally.accepted_tokens > 0


# ---- the comparison is able to fail


def test_single_rows_would_differ(
    library_target: Target, text: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding, one-token decoding takes the library's matrix-vector kernel."""
    if library_target.exact_mode != "rows":
        pytest.skip("this processor needs the fixed envelope: there are no single rows")
    monkeypatch.setattr(library_target, "min_width", 1)
    assert differing(library_target, 24, text)


def test_ordinary_attention_would_differ(text: np.ndarray) -> None:
    """transformers' own bf16 model with a tree mask, compared in the same way."""
    model, _ = load_model("smollm2", torch.bfloat16)
    model.set_attn_implementation("sdpa")
    start = 24
    context = torch.from_numpy(text[None, :start])
    rng = np.random.default_rng(0)
    tree, path = random_tree(rng, start, text[start:], model.config.vocab_size, 0)
    rows = build_rows([tree], np.zeros(1, np.int64), torch.device("cpu"), min_width=1)
    visible = torch.zeros(1, 1, len(tree), start + len(tree), dtype=torch.bool)
    visible[..., :start] = True
    for row, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            visible[0, 0, row] |= visible[0, 0, parent]
        visible[0, 0, row, start + row] = True

    def forward(tokens: torch.Tensor, cache: DynamicCache, **kwargs: torch.Tensor) -> torch.Tensor:
        return model(tokens, past_key_values=cache, use_cache=True, **kwargs).logits[0]

    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        forward(context, cache)
        expected = [
            forward(torch.from_numpy(text[None, start + i : start + i + 1]), cache)[-1]
            for i in range(len(path))
        ]
        cache = DynamicCache(config=model.config)
        forward(context, cache)
        logits = forward(
            torch.from_numpy(tree.token_ids[None]),
            cache,
            attention_mask=visible,
            position_ids=rows.positions[None],
        )
    pairs = [(logits[row], expected[depth]) for depth, row in enumerate(path)]
    # The same model and the same tree, so nearly the same numbers, but not the same bits.
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=2.0, rtol=0.1)
    assert any(not torch.equal(ours, theirs) for ours, theirs in pairs)


# ---- the fixed envelope, and no exactness at all


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fixed_envelope_is_exact(family: str, dtype: torch.dtype) -> None:
    target = tiny_target(family, dtype=dtype)
    target.exact_mode, target.min_width = "envelope", 72
    prompts = [
        Prompt(str(length), engines.random_prompt(length, length)) for length in (4, 30, BLOCK - 9)
    ]
    check = IdentityCheck(target, prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    for name in ("cold", "truth", "random", "mixed"):
        tally = check.modes()[name]()
        assert tally.exact, (name, tally)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_start_up_finds_an_exact_mode(dtype: torch.dtype) -> None:
    target = tiny_target("llama", dtype=dtype)
    target.exact_mode, target.min_width = choose_exact_mode(target)
    assert target.exact
    assert probe(target, seed=5).exact


def test_a_target_that_cannot_be_exact_says_so() -> None:
    target = tiny_target("llama")
    forward = target.decoder.forward

    class Noisy:
        fewest_rows = 4

        def forward(self, rows: rows_module.Rows, cache: KvCache) -> torch.Tensor:
            return forward(rows, cache) * (1 + 1e-6 * rows.num_rows)

    noisy = replace(target, decoder=Noisy())
    noisy.exact_mode, noisy.min_width = choose_exact_mode(noisy)
    assert noisy.exact_mode == "fast"
    assert not noisy.exact
