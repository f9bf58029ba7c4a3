"""The proof is only as good as its ability to fail: break the engine, and a check must notice.

Each mutation replaces a piece of one function's source. `identity` compares speculation with plain
decoding of the same broken engine; `reference` compares plain decoding with transformers, for
mistakes that plain and speculative decoding share.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from numba import cfunc, njit

from bench.adversary import hidden_truth
from bench.common import Prompt
from bench.identity import IdentityCheck
from tests.support import engines
from tests.support.tiny_models import EOS, tiny_model, tiny_target, wrap
from valuspec.engine import acceptance, block_pool, path_kernels, rows, tile_kernels, two_zone
from valuspec.engine import target as target_module
from valuspec.engine.acceptance import Acceptance
from valuspec.engine.attention import Attention
from valuspec.engine.block_pool import BlockPool
from valuspec.engine.engine import Engine
from valuspec.engine.kv_cache import BLOCK, KvCache
from valuspec.engine.path_attention import PathAttention
from valuspec.engine.places import Places
from valuspec.engine.probe import choose_exact_mode
from valuspec.engine.row_ops import ResidualStream, Rotary
from valuspec.engine.sequence import Sequence
from valuspec.engine.two_zone import Group, TwoZoneAttention
from valuspec.engine.types import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=1)
#: Shorter than the near zone; longer; outputs that cross a block's end.
PROMPT_LENGTHS = (5, 40, BLOCK - 9)


def identity(params: SamplingParams = GREEDY) -> bool:
    """Whether trees with distractors, alone and in batches, change neither a token nor a bit."""
    target = tiny_target("llama", dtype=torch.bfloat16)
    target.exact_mode, target.min_width = _exact_mode()
    prompts = [Prompt(str(n), engines.random_prompt(n, n)) for n in PROMPT_LENGTHS]
    try:
        check = IdentityCheck(target, prompts, params)
        return all(check.modes()[name]().exact for name in ("truth", "mixed"))
    except RuntimeError as error:  # the recorder finds tokens that no verified row leads to
        if "row" not in str(error):
            raise
        return False


@cache
def _exact_mode() -> tuple[Any, int]:
    return choose_exact_mode(tiny_target("llama", dtype=torch.bfloat16))


def seeded_identity() -> bool:
    return identity(SEEDED)


def sharing() -> bool:
    """Whether requests that begin alike, or have equal blocks elsewhere, keep their outputs."""
    target = tiny_target("llama", dtype=torch.bfloat16)
    target.exact_mode, target.min_width = _exact_mode()
    x, y, z = (engines.random_prompt(seed, BLOCK) for seed in (1, 2, 3))
    tails = [engines.random_prompt(seed, 70) for seed in (4, 5)]
    beginnings = [(*x, *y), (*z, *y), y]
    prompts = [*beginnings, *((*beginning, *tail) for beginning in beginnings for tail in tails)]
    requests = [
        engines.request(str(n), prompt, max_tokens=80, ignore_eos=True)
        for n, prompt in enumerate(prompts * 2)
    ]
    engine = engines.engine_of(target, max_batch_size=2, kv_tokens=8 * BLOCK)
    results = engines.run(engine, requests)
    apart = [engines.plain(target, r) for r in requests[: len(prompts)]]
    return [results[r.request_id].visible for r in requests] == [a.visible for a in apart * 2]


def ending() -> bool:
    """Whether a stop token inside an accepted run ends the output as in plain decoding."""
    target = tiny_target("llama")
    prompt = engines.random_prompt(0, 30)
    future = engines.plain(target, engines.request("a", prompt, max_tokens=20)).token_ids
    request = engines.request("a", prompt, max_tokens=20, stop_token_ids=(future[7],))
    drafter = engines.scripted(target, {prompt: future}, hidden_truth)
    results = [engines.run(engines.engine_of(target, drafter), [request])["a"] for _ in range(5)]
    return all(r.visible == engines.plain(target, request).visible for r in results)


def reference() -> bool:
    """Whether plain decoding gives the tokens of transformers, with and without a window."""
    return all(
        engines.plain(wrap(tiny_model(family)), request).token_ids == expected
        for family in ("llama", "mistral_window", "mistral_narrow_window")
        for request, expected in _transformers_outputs(family)
    )


@cache
def _transformers_outputs(family: str) -> list[tuple[Any, list[int]]]:
    model = tiny_model(family)
    outputs = []
    for length in PROMPT_LENGTHS:
        prompt = engines.random_prompt(length, length)
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
        request = engines.request("a", prompt, max_tokens=20)
        outputs.append((request, output[0, length:].tolist()))
    return outputs


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in the source of `owner.name`."""

    label: str
    owner: Any
    name: str
    old: str
    new: str
    noticed_by: Callable[[], bool] = identity
    attention: type[Attention] = PathAttention

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(target_module, "attention_for", lambda *_: self.attention)
        function = inspect.getattr_static(self.owner, self.name)
        if hasattr(function, "py_func"):
            function = function.py_func
            monkeypatch.setattr(self.owner, "kernel", njit)  # leaves no copy on disk
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, "the code has changed; the mutation needs to follow"
        code = compile(
            source.replace(self.old, self.new),
            f"<mutation: {self.label}>",
            "exec",
            flags=annotations.compiler_flag,
        )
        defined: dict[str, Any] = {}
        exec(code, vars(sys.modules[function.__module__]), defined)
        monkeypatch.setattr(self.owner, self.name, defined[function.__name__])
        if hasattr(self.owner, "entry_point"):  # compile anew what may call it
            monkeypatch.setattr(self.owner, "entry_point", lambda of, f: cfunc(of)(f))
            for name, other in list(vars(self.owner).items()):
                if hasattr(other, "py_func"):
                    monkeypatch.setattr(self.owner, name, njit(other.py_func))
                elif name.endswith("entry"):
                    monkeypatch.setattr(self.owner, name, cache(other.__wrapped__))


TwoZoneMutation = partial(Mutation, attention=TwoZoneAttention)

MUTATIONS = [
    # ---- the mask
    TwoZoneMutation("far keys up to the query itself", Group, "masks",
             "keys > p - NEAR", "keys > p"),
    TwoZoneMutation("no far mask", Group, "masks", "(keys > p - NEAR)", "(keys > p + 40)"),
    TwoZoneMutation("one key lost between the zones", Group, "masks",
             "keys > p - NEAR", "keys >= p - NEAR", reference),
    TwoZoneMutation("one key in both zones", Group, "masks",
             "keys > p - NEAR", "keys > p - NEAR + 1", reference),
    TwoZoneMutation("positions before the first token are seen", Group, "masks",
             "(near < 0) |", "(near < -40) |", reference),
    TwoZoneMutation("first token hidden", Group, "masks", "(near < 0)", "(near < 1)", reference),
    TwoZoneMutation("window one too wide", Group, "masks",
             "keys <= lowest", "keys < lowest", reference),
    TwoZoneMutation("window one too narrow near by", Group, "masks",
             "near <= lowest", "near <= lowest + 1", reference),
    # ---- the zone rule
    TwoZoneMutation("zone of the tree's root for all its rows", Group, "masks",
             "keys > p - NEAR", "keys > p.min() - NEAR"),
    TwoZoneMutation("near zone in order of slots, not of the path",
             rows, "_lay_out",
             "near[row, j] = near[first + parent, j + 1]",
             "near[row, j] = slots[row] - (NEAR - 1 - j)"),
    TwoZoneMutation("near zone not shifted from parent to child",
             rows, "_lay_out",
             "near[first + parent, j + 1]", "near[first + parent, j]"),
    TwoZoneMutation("near zone begins a token early", rows, "_lay_out",
             "positions[row] - (NEAR - 1 - j)",
             "positions[row] - (NEAR - 1 - j) - (not in_order)"),
    TwoZoneMutation("near zone without the row itself", rows, "_lay_out",
             "near[row, NEAR - 1] = slots[row]", "near[row, NEAR - 1] = slots[row] - 1"),
    Mutation("trees taken for chains", rows, "_lay_out", "and parents[first + i] == i - 1", ""),
    # ---- position ids
    Mutation("position is the slot", rows, "_lay_out",
             "positions[first + parent] + 1", "min(slots[row], start + NEAR - 1)"),
    Mutation("children at their parent's position", rows, "_lay_out",
             "positions[first + parent] + 1", "positions[first + parent]"),
    Mutation("chains one position late", rows, "_lay_out",
             "start + i if in_order else start", "start + i + (start > 0) if in_order else start",
             reference),
    # ---- acceptance
    Mutation("any child accepted", acceptance, "verify",
             "children.get((row, token))",
             "next((r for (p, _), r in children.items() if p == row), None)"),
    Mutation("the right token under a wrong parent accepted", acceptance, "verify",
             "children.get((row, token))",
             "next((r for (_, t), r in children.items() if t == token and r > row), None)"),
    Mutation("tokens after the end kept", Sequence, "emit", "break", "pass", ending),
    Mutation("all draws of a step from one position", acceptance, "choices",
             " + next(ahead)", "", seeded_identity),
    # ---- the KV commit
    Mutation("accepted rows not moved", Acceptance, "_commit", "if places:", "if False:"),
    Mutation("accepted rows moved one slot too far", Acceptance, "_commit",
             "targets.append(tree.start + order)", "targets.append(tree.start + order + 1)"),
    Mutation("the row before the accepted one moved", Acceptance, "_commit",
             "sources.append(tree.start + row)", "sources.append(tree.start + row - 1)"),
    Mutation("only keys moved", KvCache, "move", "values.index_copy_(", "(lambda *_: None)("),
    Mutation("only values moved", KvCache, "move", "keys.index_copy_(", "(lambda *_: None)("),
    # ---- the batch
    Mutation("a key that forgets what came before", block_pool, "next_key",
             "key + np", "np", sharing),
    Mutation("a copied beginning that is too long", BlockPool, "continuation",
             "same.argmin()", "len(same) - 1", sharing),
    Mutation("a beginning copied from the wrong block", Engine, "_copy",
             "copy.source * BLOCK + within", "copy.target * BLOCK + within", sharing),
    Mutation("a table that is not written", Places, "grow",
             "self.tables[sequence.place, : len(sequence.blocks)]", "_"),
    TwoZoneMutation("results of batch mates swapped", two_zone, "_build_group",
             "places.append(i * width + ", "places.append((count - 1 - i) * width + "),
    Mutation("two rows' keys and values in one cell", path_kernels, "_store",
             "cells[row : row + 1]", "cells[row - row % 2 : row + 1]"),
    # ---- products
    Mutation("rows of a second tile begin one late", tile_kernels, "_multiply",
             "PAIR_BYTES * p.num_pairs * low", "PAIR_BYTES * p.num_pairs * (low - (chunk > 0))"),
    Mutation("a row's sum that its neighbours know", tile_kernels, "_write_tile",
             "multiples[row // scale]", "multiples[1]"),
    # ---- the path
    Mutation("the first of the near slots for the last", path_kernels, "_slot",
             "paths.near.shape[1] - (paths.lengths[row] - j)", "j - paths.starts[row]"),
    Mutation("keys before the window weighed", path_kernels, "_attend_together",
             "skip = min(count, max(0, paths.lowest[row] - at))", "skip = 0", reference),
    Mutation("window one too narrow on the path", PathAttention, "_through",
             "paths[3] - window", "paths[3] - window + 1", reference),
    Mutation("a tree row does not see itself", rows, "_lay_out",
             "lengths[row] = positions[row] + 1",
             "lengths[row] = max(positions[row], starts[row])"),
    # ---- the block
    Mutation("rotation the other way round", Rotary, "rotate",
             "turned, sin[:, None]", "turned, -sin[:, None]", reference),
    Mutation("a residual forgotten", ResidualStream, "add",
             "self._hidden.add_(residual)", "self._hidden.add(residual)", reference),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.label)
def test_mutation_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    _exact_mode()  # found with the engine whole
    mutation.apply(monkeypatch)
    assert not mutation.noticed_by()


@pytest.mark.parametrize("check", [identity, seeded_identity, sharing, ending, reference])
def test_checks_pass_on_the_engine_as_it_is(check: Callable[[], bool]) -> None:
    assert check()


def test_every_promised_part_is_mutated() -> None:
    """Mask, zone rule, position ids, acceptance and KV commit, with identity as the judge."""
    judged = {(m.owner, m.name) for m in MUTATIONS if m.noticed_by is identity}
    assert judged >= {
        (Group, "masks"),
        (rows, "_lay_out"),
        (acceptance, "verify"),
        (Acceptance, "_commit"),
        (KvCache, "move"),
    }
