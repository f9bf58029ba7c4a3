"""Which token the target chooses, given its logits: the argmax, or a draw keyed by position.

The draw for output position i uses a counter-based generator with key (seed, i), so it does not
depend on how many draws came before, on batch mates or on speculation. One draw per position, and
that draw is the output: a candidate node is accepted when it equals the draw.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from valuspec.engine.bits import as_numpy
from valuspec.engine.types import SamplingParams
from valuspec.jit import kernel

INFINITY = 0x7F80
"""The bits of it in bf16; greater ones are not numbers."""
SOME = 1024
"""Logits looked through at a time."""


class Greedy:
    """The most likely token of each row of logits [num_rows, vocabulary]; ties go to the lowest id.

    A row is looked at when it is asked for: few of a tree's rows are. On a GPU all are at once.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._on_cpu = logits.device.type == "cpu"
        self._bits = as_numpy(logits) if self._on_cpu and logits.dtype == torch.bfloat16 else None

    def token(self, row: int) -> int:
        if not self._on_cpu:
            return self._all[row]
        best = -1 if self._bits is None else _first_maximum(self._bits[row])
        return best if best >= 0 else int(self._logits[row].argmax())

    @cached_property
    def _all(self) -> list[int]:
        tokens: list[int] = self._logits.argmax(-1).tolist()
        return tokens


@kernel
def _first_maximum(bits: NDArray[np.int16]) -> int:
    """Of bf16 numbers, by their bits; -1 where one is not a number.

    torch scans bf16 one by one. As integers, with the order of negatives turned round and the two
    zeros made equal, they are compared many at a time.
    """
    greatest, least, found = np.int32(-0x10000), np.int32(0x10000), 0
    for first in range(0, bits.size, SOME):
        most = np.int32(-0x10000)
        for index in range(first, min(first + SOME, bits.size)):
            rank = _rank(bits[index])
            most, least = max(most, rank), min(least, rank)
        if most > greatest:
            greatest, found = most, first
    if greatest > INFINITY or least < -INFINITY:
        return -1
    while _rank(bits[found]) != greatest:
        found += 1
    return found


@kernel
def _rank(bits: Any) -> Any:
    """An integer that is greater for a greater number."""
    wide = np.int32(bits)
    sign = wide >> np.int32(31)  # -1 for negatives
    return np.int32((wide ^ np.int32(sign & np.int32(0x7FFF))) - sign)


def sample_token(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Draw the token at `position` (tokens before it, prompt included) from logits [vocabulary].

    Temperature, then the top_k most likely, then the smallest set whose probability reaches top_p.
    """
    scaled = logits.double().cpu().numpy() / params.temperature
    order = np.argsort(-scaled, kind="stable")  # ties: lowest id first
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    cumulative = np.cumsum(weights)
    if params.top_p < 1.0:
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    draw = Generator(Philox(key=params.seed, counter=position)).random() * cumulative[-1]
    index = int(np.searchsorted(cumulative, draw, side="right"))
    return int(order[min(index, len(order) - 1)])
