"""Choosing tokens: argmax with lowest-id ties, and draws keyed by (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.random import Generator, Philox

from tests.support import engines
from tests.support.tiny_models import tiny_target
from valuspec.engine.kv_cache import own_blocks
from valuspec.engine.rows import SequenceRows
from valuspec.engine.sampling import Greedy, sample_token
from valuspec.engine.types import SamplingParams
from valuspec.engine.verify import verify
from valuspec.errors import RequestError

pytestmark = pytest.mark.usefixtures("one_thread")
LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 2.0, 0.5])
GOLDEN_SEED_7 = [5, 2, 2, 4, 2, 4, 4, 2, 1, 4, 0, 4, 2, 1, 4, 2]
GOLDEN_SEED_BIG = [1, 4, 4, 2, 2, 4, 1, 4, 2, 2, 2, 2, 5, 2, 2, 4]
GOLDEN_TOP_2 = [4, 2, 2, 2, 2, 2, 4, 2, 4, 2, 4, 4, 2, 4, 4, 2]


def draws(logits: torch.Tensor, count: int, **params: float) -> list[int]:
    chosen = SamplingParams(**{"temperature": 1.0} | params)  # type: ignore[arg-type]
    return [sample_token(logits, chosen, position) for position in range(count)]


def chi_square(tokens: list[int], probabilities: np.ndarray) -> float:
    seen = np.bincount(tokens, minlength=len(probabilities))
    expected = len(tokens) * probabilities
    assert not np.any(seen[expected == 0]), "a token of probability zero was drawn"
    possible = expected > 0
    return float((((seen - expected)[possible]) ** 2 / expected[possible]).sum())


def greedy(logits: torch.Tensor) -> int:
    return Greedy(torch.stack([-logits, logits])).token(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_argmax_and_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    assert greedy(LOGITS.to(dtype)) == 2
    assert greedy(torch.zeros(49152, dtype=dtype)) == 0
    spread = torch.full((49152,), -3.0, dtype=dtype)
    spread[[70, 30_000, 49_151]] = -1
    assert greedy(spread) == 70
    zeros = torch.full((99,), -1.0, dtype=dtype)
    zeros[40], zeros[50] = -0.0, 0.0
    assert greedy(zeros) == 40, "the two zeros are equal"
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        row = (torch.randn(997, generator=generator) * 2 - 3).to(dtype)
        row[seed] = torch.inf if seed % 5 == 0 else row[seed]
        row[seed + 1] = -torch.inf
        ties = torch.nonzero(row == row.max())
        assert greedy(row) == int(ties[0])
        row[seed * 19] = -torch.nan if seed % 2 else torch.nan
        assert greedy(row) == int(row.argmax()), "as torch, for what is not a number"


def test_golden_draws() -> None:
    """A changed generator would change every seeded answer that users have kept."""
    assert draws(LOGITS, 16, seed=7) == GOLDEN_SEED_7
    assert draws(LOGITS, 16, seed=2**62) == GOLDEN_SEED_BIG
    assert draws(LOGITS, 16, seed=7, top_k=2, temperature=0.7) == GOLDEN_TOP_2


def test_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    forward = [sample_token(LOGITS, params, position) for position in range(50)]
    backward = [sample_token(LOGITS, params, position) for position in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != draws(LOGITS, 50, seed=4)
    # Neighbouring positions and seeds give unrelated draws.
    uniform = [
        Generator(Philox(key=seed, counter=position)).random()
        for seed in range(20)
        for position in range(20)
    ]
    table = np.array(uniform).reshape(20, 20)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.15
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.15


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_distribution_is_softmax(temperature: float) -> None:
    probabilities = torch.softmax(LOGITS.double() / temperature, 0).numpy()
    tokens = draws(LOGITS, 4000, temperature=temperature, seed=11)
    assert chi_square(tokens, probabilities) < 20.5  # 5 degrees of freedom, p = 0.001


def test_top_k_keeps_the_most_likely_and_breaks_ties_by_id() -> None:
    assert set(draws(LOGITS, 300, top_k=1)) == {2}
    assert set(draws(LOGITS, 300, top_k=2)) == {2, 4}
    assert set(draws(LOGITS, 300, top_k=3)) == {2, 4, 1}
    assert draws(LOGITS, 300, top_k=6) == draws(LOGITS, 300, top_k=1000) == draws(LOGITS, 300)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64))
    assert set(draws(logits, 300, top_p=1e-9)) == {0}
    assert set(draws(logits, 300, top_p=0.45)) == {0}
    assert set(draws(logits, 300, top_p=0.7)) == {0, 1}
    assert set(draws(logits, 300, top_p=0.8)) == {0, 1, 2}
    assert set(draws(logits, 300, top_p=1.0)) == {0, 1, 2, 3}
    probabilities = np.array([2 / 3, 1 / 3, 0, 0])
    assert chi_square(draws(logits, 3000, top_p=0.7, seed=5), probabilities) < 10.9


def test_top_k_comes_before_top_p() -> None:
    """top_p is a share of what top_k has left, as in transformers."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert set(draws(logits, 300, top_k=2, top_p=0.55)) == {0}
    assert set(draws(logits, 300, top_k=2, top_p=0.6)) == {0, 1}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])
    assert set(draws(logits, 300)) == {1, 3}
    assert set(draws(torch.tensor([1e4, -1e4, 0.0]), 50, temperature=0.01)) == {0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")), ("top_k", -1),
        ("seed", -1), ("seed", 2**63), ("max_tokens", 0), ("stop", ("",)), ("stop", ("x" * 513,)),
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refusal.value.param == name


def test_speculative_walk_keeps_the_distribution() -> None:
    """The first two tokens of a walk through a full tree are distributed as the target's."""
    first = torch.tensor([0.2, 1.0, -0.5])
    second = torch.tensor([[0.0, 1.0, 0.3], [0.7, 0.0, 0.1], [0.0, 0.0, 1.5]])
    rows = SequenceRows(0, 4, np.array([0, 0, 1, 1, 2]), np.array([-1, 0, 0, 1, 2]))
    logits = [first, second[0], second[1]]
    pairs = []
    for seed in range(4000):
        params = SamplingParams(temperature=1.0, seed=seed)
        position = iter(range(5, 9))

        def choose(row: int, params: SamplingParams = params, position: object = position) -> int:
            leaf = torch.zeros(3)
            table = logits[row] if row < len(logits) else leaf
            return sample_token(table, params, next(position))  # type: ignore[call-overload]

        tokens = verify(rows, choose).token_ids
        if len(tokens) == 1:  # token 2 is not in the tree: the next step decodes it
            tokens += (sample_token(second[2], params, next(position)),)
        pairs.append(tokens[0] * 3 + tokens[1])
    joint = torch.softmax(first.double(), 0)[:, None] * torch.softmax(second.double(), 1)
    assert chi_square(pairs, joint.flatten().numpy()) < 26.1  # 8 degrees of freedom, p = 0.001


def test_engine_draws_are_those_of_sequential_sampling() -> None:
    """Without the engine: one forward over the whole text per token."""
    target = tiny_target("llama")
    prompt = engines.random_prompt(3, 20)
    params = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 12}
    result = engines.plain(target, engines.request("a", prompt, max_tokens=10, **params))
    text = list(prompt)
    for token in result.token_ids:
        cache = target.new_cache(own_blocks(1, 64))
        logits = target.forward([SequenceRows.chain(0, 0, np.array(text))], cache)[-1]
        assert token == sample_token(logits, SamplingParams(**params), len(text))  # type: ignore[arg-type]
        text.append(token)
