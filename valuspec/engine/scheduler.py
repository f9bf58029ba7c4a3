"""Who runs in the next step: a pure function from the engine's state to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Prompt tokens computed in one step, beside everybody's decoding.
PREFILL_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence that holds a place in the cache."""

    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens already in the cache."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    num_admitted: how many waiting requests, oldest first, take the next free places
    decode:       places of the sequences that verify a tree (or decode one token)
    prefill:      (place, first, last + 1) of the prompt chunk to compute, or None
    """

    num_admitted: int
    decode: tuple[int, ...]
    prefill: tuple[int, int, int] | None


def schedule(
    running: Sequence[Running],
    waiting: Sequence[int],
    *,
    max_batch_size: int,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Plan:
    """Plan a step.

    running: by place; waiting: prompt lengths, oldest first
    Everyone past its prompt decodes in every step, so no stream waits for another. One chunk of
    one prompt runs beside them; a prompt once begun is finished before the next, so at most
    max_batch_size prompts are ever ahead of one that holds a place.
    """
    num_admitted = min(len(waiting), max_batch_size - len(running))
    places = [*running, *(Running(length, 0) for length in waiting[:num_admitted])]
    decode = tuple(i for i, s in enumerate(places) if s.computed_tokens == s.prompt_tokens)
    pending = [i for i, s in enumerate(places) if s.computed_tokens < s.prompt_tokens]
    if not pending:
        return Plan(num_admitted, decode, None)
    place = max(pending, key=lambda i: (places[i].computed_tokens, -i))
    first = places[place].computed_tokens
    last = min(first + prefill_chunk, places[place].prompt_tokens)
    return Plan(num_admitted, decode, (place, first, last))
