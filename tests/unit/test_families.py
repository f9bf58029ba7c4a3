"""Every family decodes as transformers does, in fp32, with speculation and without."""

from __future__ import annotations

import pytest
import torch

from bench.adversary import hidden_truth
from tests.support import engines
from tests.support.tiny_models import EOS, FAMILIES, LEAN, tiny_model, wrap
from valuspec.engine.attention import Attention
from valuspec.engine.decoder import LeanDecoder, TransformersDecoder
from valuspec.engine.kv_cache import BLOCK, own_blocks
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.probe import probe
from valuspec.engine.rows import SequenceRows
from valuspec.engine.two_zone import TwoZoneAttention
from valuspec.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

SUPPORTED = [name for name in FAMILIES if name != "bloom"]
#: Short; shorter than the near zone; ending just before a block's end; beyond it.
PROMPT_LENGTHS = (40, 3, BLOCK - 10, BLOCK + 44)
NUM_TOKENS = 24


both_attentions = pytest.mark.parametrize(
    "attention", [PathAttention, TwoZoneAttention], ids=["path", "two_zone"]
)


@both_attentions
@pytest.mark.parametrize("family", SUPPORTED)
def test_greedy_tokens_are_those_of_transformers(family: str, attention: type[Attention]) -> None:
    model = tiny_model(family)
    target = wrap(model)
    target.attention = attention
    expected, requests = {}, []
    for length in PROMPT_LENGTHS:
        prompt = engines.random_prompt(length, length)
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
        expected[prompt] = output[0, length:].tolist()
        requests.append(engines.request(str(length), prompt, max_tokens=NUM_TOKENS))
    assert len({token for output in expected.values() for token in output}) > 8, "model too dull"

    for request in requests:
        assert engines.plain(target, request).token_ids == expected[request.prompt_ids]

    drafter = engines.scripted(target, expected, hidden_truth)
    results = engines.run(engines.engine_of(target, drafter, max_batch_size=3), requests)
    for request in requests:
        assert results[request.request_id].token_ids == expected[request.prompt_ids]
    assert sum(result.num_accepted for result in results.values()) > NUM_TOKENS


@both_attentions
@pytest.mark.parametrize("family", SUPPORTED)
def test_logits_are_those_of_transformers(family: str, attention: type[Attention]) -> None:
    model = tiny_model(family)
    target = wrap(model)
    target.attention = attention
    tokens = torch.tensor(engines.random_prompt(1, 2 * BLOCK + 30))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    cache = target.new_cache(own_blocks(1, len(tokens)))
    # In uneven chunks, so that most chunks begin inside a block.
    logits, first = [], 0
    for size in (1, 100, 2, 155, len(tokens) - 258):
        rows = SequenceRows.chain(0, first, tokens[first : first + size].numpy())
        logits.append(target.forward([rows], cache))
        first += size
    torch.testing.assert_close(torch.cat(logits), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", SUPPORTED)
def test_lean_block_serves_the_llama_family(family: str) -> None:
    decoder = wrap(tiny_model(family)).decoder
    assert isinstance(decoder, LeanDecoder if family in LEAN else TransformersDecoder)


def test_sliding_window_matters() -> None:
    """The windows of these tests are narrow enough to change the output."""
    prompt = engines.random_prompt(0, 60)
    request = engines.request("a", prompt, max_tokens=12)
    outputs = [
        engines.plain(wrap(tiny_model(family)), request).token_ids
        for family in ("mistral", "mistral_window", "mistral_narrow_window")
    ]
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]


def test_architecture_without_attention_interface_is_refused() -> None:
    """BLOOM adds position biases inside its own attention code."""
    target = wrap(tiny_model("bloom"))
    with pytest.raises(ModelError, match="bloom"):
        probe(target)  # the first thing that loading does
