"""Who runs in the next step: a pure function from the engine's state to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Rows of prompts computed in one step when nobody decodes.
PREFILL_ROWS = 256
#: Rows of prompts computed beside decoding: a step stays short for those who stream. Where more
#: wait than stream, as many times more: then most of the batch gains by a longer step.
MIXED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence with blocks, in order of admission.

    context:  tokens to have in the cache before it decodes
    computed: those that are there
    growth:   blocks to add before it can decode another step
    blocks:   blocks that giving it up would free
    """

    context: int
    computed: int
    growth: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without blocks, oldest first; `blocks` it needs to begin."""

    context: int
    blocks: int
    cached: int = 0
    """Leading tokens of the context that are in the cache already."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Indices are into running, followed by the admitted.

    preempted:    running sequences, youngest first, that give their blocks back and wait again
    num_admitted: how many waiting requests, oldest first, begin to run
    decode:       those that verify a tree (or decode one token)
    prefill:      (index, rows) of contexts to compute further, rows at most
    """

    preempted: tuple[int, ...]
    num_admitted: int
    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]


def schedule(
    running: Sequence[Running],
    waiting: Sequence[Waiting],
    *,
    num_places: int,
    num_blocks: int,
    prefill_rows: int = PREFILL_ROWS,
    mixed_rows: int = MIXED_ROWS,
) -> Plan:
    """Plan a step.

    num_places: most sequences that may run; num_blocks: blocks available now
    Everyone past its context decodes in every step, so no stream waits for another. Prompts share
    the remaining rows, oldest first. When blocks run out, the youngest gives way: the oldest
    always goes on, so everybody gets through. Nobody is admitted in a step that lacks blocks, or
    before an older request.
    """
    preempted: list[int] = []
    left = num_blocks - sum(s.growth for s in running)
    while left < 0 and len(preempted) < len(running) - 1:
        youngest = len(running) - 1 - len(preempted)
        preempted.append(youngest)
        left += running[youngest].growth + running[youngest].blocks
    staying = running[: len(running) - len(preempted)]

    num_admitted = 0
    while not preempted and num_admitted < min(len(waiting), num_places - len(running)):
        if waiting[num_admitted].blocks > left:
            break
        left -= waiting[num_admitted].blocks
        num_admitted += 1
    everyone = [*staying, *(Running(w.context, w.cached) for w in waiting[:num_admitted])]

    decode = tuple(i for i, s in enumerate(everyone) if s.computed == s.context)
    rows = prefill_rows
    if decode:
        num_filling = len(everyone) - len(decode)
        rows = min(rows, max(mixed_rows, mixed_rows * num_filling // len(decode)))
    prefill = []
    for index, sequence in enumerate(everyone):
        count = min(rows, sequence.context - sequence.computed)
        if count > 0:
            prefill.append((index, count))
            rows -= count
    return Plan(tuple(preempted), num_admitted, decode, tuple(prefill))
