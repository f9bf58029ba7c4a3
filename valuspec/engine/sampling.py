"""Which token the target chooses, given its logits: the argmax, or a draw keyed by position.

The draw for output position i uses a counter-based generator with key (seed, i), so it does not
depend on how many draws came before, on batch mates or on speculation. One draw per position, and
that draw is the output: a candidate node is accepted when it equals the draw.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import Generator, Philox

from valuspec.engine.types import SamplingParams


def greedy_token(logits: torch.Tensor) -> int:
    """Most likely token of one row of logits [vocabulary]; ties go to the lowest id."""
    if logits.device.type != "cpu" or logits.dtype != torch.bfloat16:
        return int(logits.argmax())
    # torch scans bf16 one by one. Read as integers, with the order of negatives turned round,
    # numpy finds the same first maximum sixteen times faster.
    bits = logits.view(torch.int16).numpy()
    best = int((bits ^ ((bits >> 15) & 0x7FFF)).argmax())
    # The two zeros are a tie, but their bits differ.
    return best if logits[best] != 0 else int(logits.argmax())


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
