"""Closed loops: so many clients each ask their next question as soon as they have an answer."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from bench import common
from bench.clients import Client, Timed


@dataclass(slots=True)
class Turn:
    """One pass of one system over some questions."""

    seconds: float
    answers: list[Timed]

    @property
    def tok_s(self) -> float:
        return sum(len(a.token_ids) for a in self.answers) / self.seconds


async def ask_all(
    client: Client, prompts: Sequence[common.Prompt], concurrency: int, *, title: str
) -> Turn:
    """Put every question, `concurrency` at a time."""
    answers: list[Timed | None] = [None] * len(prompts)
    questions = iter(enumerate(prompts))
    started = time.perf_counter()
    with tqdm(total=len(prompts), desc=title, unit="answer", file=sys.stderr) as bar:

        async def one_client() -> None:
            for index, prompt in questions:
                answers[index] = await client.ask(prompt.token_ids)
                bar.update()

        await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return Turn(time.perf_counter() - started, [a for a in answers if a is not None])


@dataclass(slots=True)
class Level:
    """The same questions at one concurrency, by plain and by speculative decoding, turn by turn.

    peer: turns of another server, whose answers are timed and not compared; none without one
    """

    plain: list[Turn] = field(default_factory=list)
    speculative: list[Turn] = field(default_factory=list)
    peer: list[Turn] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        plain, speculative = _tok_s(self.plain), _tok_s(self.speculative)
        pairs = [
            (a, b)
            for without, with_ in zip(self.plain, self.speculative, strict=True)
            for a, b in zip(without.answers, with_.answers, strict=True)
        ]
        asked = [a for turn in (*self.plain, *self.speculative, *self.peer) for a in turn.answers]
        result = {
            "plain_tok_s": plain,
            "speculative_tok_s": speculative,
            "ratio": speculative / plain,
            "compared": len(pairs),
            "identical": sum(a.token_ids == b.token_ids for a, b in pairs),
            "failures": sum(answer.error is not None for answer in asked),
            "plain": _latency(self.plain),
            "speculative": _latency(self.speculative),
        }
        if self.peer:
            peer = _tok_s(self.peer)
            result |= {
                "peer_tok_s": peer,
                "plain_over_peer": plain / peer,
                "peer": _latency(self.peer),
            }
        return result


def _tok_s(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.tok_s for turn in turns)


def _latency(turns: Sequence[Turn]) -> dict[str, float]:
    answers = [a for turn in turns for a in turn.answers if a.error is None]
    first = [a.first_token_s for a in answers] or [0.0]
    gaps = [gap for a in answers for gap in a.gaps_s] or [0.0]
    return {
        f"{name}_p{q}_ms": 1e3 * float(np.percentile(values, q))
        for name, values in (("ttft", first), ("itl", gaps))
        for q in (50, 95)
    }
