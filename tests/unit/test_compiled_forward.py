"""The program of a forward has the bits of the same layers called one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import engines
from tests.support.tiny_models import LEAN, tiny_target
from valuspec.engine import tile_kernels
from valuspec.engine.decoder import LeanDecoder
from valuspec.engine.kv_cache import BLOCK, own_blocks
from valuspec.engine.probe import choose_exact_mode, random_tree
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target

pytestmark = [
    pytest.mark.usefixtures("threads_of_torch"),
    pytest.mark.skipif(not tile_kernels.supported(), reason="oneDNN is faster on this processor"),
]


def forwards(target: Target) -> list[torch.Tensor]:
    """Logits and features: prompts in chunks, then trees of two sequences, then one row."""
    rng = np.random.default_rng(0)
    tokens = np.array(engines.random_prompt(7, 2 * BLOCK + 40))
    cache = target.new_cache(own_blocks(2, len(tokens) + 64))
    found = []
    for place, sizes in ((0, (1, 90, 60, 3)), (1, (200, 17))):
        first = 0
        for size in sizes:
            rows = SequenceRows.chain(place, first, tokens[first : first + size])
            found.append(target.forward([rows], cache))
            first += size
    trees = [
        random_tree(rng, start, tokens[start:], target.vocab_size, place)[0]
        for place, start in ((0, 154), (1, 217))
    ]
    found.append(target.forward(trees, cache))
    found.append(target.forward([SequenceRows.chain(0, 154, tokens[154:155])], cache))
    if target.features is not None:
        found.append(target.features[:1])
    return found


def layer_by_layer(target: Target) -> Target:
    assert isinstance(target.decoder, LeanDecoder)
    assert target.decoder._compiled is not None
    target.decoder._compiled = None
    return target


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("family", LEAN)
def test_as_layer_by_layer(family: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    compiled = tiny_target(family, dtype=torch.bfloat16)
    one_by_one = layer_by_layer(tiny_target(family, dtype=torch.bfloat16))
    assert compiled.min_width == 1
    for at, (found, expected) in enumerate(
        zip(forwards(compiled), forwards(one_by_one), strict=True)
    ):
        assert torch.equal(found, expected), at


@pytest.mark.parametrize("family", ["llama_bias", "mistral_window", "qwen3"])
def test_without_the_instruction_rows_are_padded_and_exact(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_kernels, "supported", lambda: False)
    target = tiny_target(family, dtype=torch.bfloat16)
    target.exact_mode, target.min_width = choose_exact_mode(target)
    assert target.exact
    assert target.min_width >= 4


def test_features_too_and_other_ones_later() -> None:
    compiled = tiny_target("llama", dtype=torch.bfloat16, num_hidden_layers=4)
    one_by_one = layer_by_layer(tiny_target("llama", dtype=torch.bfloat16, num_hidden_layers=4))
    for layers in ((0, 2, 3), (1,), ()):
        compiled.show_features(layers)
        one_by_one.show_features(layers)
        found, expected = forwards(compiled), forwards(one_by_one)
        assert all(map(torch.equal, found, expected)), layers
    assert compiled.features is None


def test_caches_by_turns() -> None:
    """The program remembers where a cache lies; another one, or a later one there, is noticed."""
    target = tiny_target("llama", dtype=torch.bfloat16)
    tokens = np.array(engines.random_prompt(7, 40))
    caches = [target.new_cache(own_blocks(1, 64)) for _ in range(2)]
    texts = [tokens[:20], tokens[20:]]
    for cache, text in zip(caches, texts, strict=True):
        target.forward([SequenceRows.chain(0, 0, text)], cache)
    following = [SequenceRows.chain(0, 20, tokens[:1])]
    first, second = (target.forward(following, cache) for cache in caches)
    assert not torch.equal(first, second)
    caches[0] = None  # type: ignore[call-overload]
    for text, expected in zip(texts, (first, second), strict=True):
        cache = target.new_cache(own_blocks(1, 64))
        target.forward([SequenceRows.chain(0, 0, text)], cache)
        assert torch.equal(target.forward(following, cache), expected)


@pytest.mark.parametrize(
    "rows",
    [
        SequenceRows.chain(0, 0, np.array([3, -1])),
        SequenceRows.chain(0, 0, np.array([3, 1 << 40])),
        SequenceRows.chain(0, 2 * BLOCK - 1, np.array([3, 4])),
        SequenceRows.chain(1, 0, np.array([3])),
        SequenceRows.chain(0, 1 << 40, np.array([3])),
    ],
    ids=["token", "large token", "behind its blocks", "no such sequence", "position"],
)
def test_what_is_out_of_range_is_refused(rows: SequenceRows) -> None:
    """Compiled code would read and write somewhere else."""
    target = tiny_target("llama", dtype=torch.bfloat16)
    with pytest.raises(IndexError):
        target.forward([rows], target.new_cache(own_blocks(1, 2 * BLOCK)))


def test_parents_come_earlier() -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    cache = target.new_cache(own_blocks(1, BLOCK))
    for parents in ([-1, 1], [-2, 0], [-1, 7]):
        with pytest.raises(ValueError, match="follows no earlier row"):
            target.forward([SequenceRows(0, 5, np.array([3, 4]), np.array(parents))], cache)


def test_any_array_may_name_the_rows_to_predict_from() -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    rows = [SequenceRows.chain(0, 0, np.array(engines.random_prompt(7, 12)))]
    cache = target.new_cache(own_blocks(1, BLOCK))
    whole = target.forward(rows, cache)
    for wanted in (np.arange(12)[::-3], np.arange(12, dtype=np.int32)[1::2]):
        assert torch.equal(target.forward(rows, cache, wanted), whole[wanted.copy()])
