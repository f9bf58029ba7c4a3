"""The scheduler over random histories: nobody starves, nobody is forgotten, no limit is broken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import num_histories
from valuspec.engine.scheduler import Plan, Running, Waiting, schedule

BLOCK = 10
"""Tokens a block holds in these histories."""


@pytest.mark.parametrize(
    ("running", "waiting", "plan"),
    [
        pytest.param([], [], Plan((), 0, (), ()), id="idle"),
        pytest.param([], [(10, 1)], Plan((), 1, (), ((0, 10),)), id="first request"),
        pytest.param([], [(700, 9)], Plan((), 1, (), ((0, 256),)), id="long prompt, first chunk"),
        pytest.param([(700, 512)], [], Plan((), 0, (), ((0, 188),)), id="last chunk"),
        pytest.param([(5, 5), (9, 9)], [], Plan((), 0, (0, 1), ()), id="all decode"),
        pytest.param([(5, 5), (9, 9)], [(4, 1)], Plan((), 0, (0, 1), ()), id="no place free"),
        pytest.param([(5, 5)], [(4, 1), (3, 1)], Plan((), 1, (0,), ((1, 4),)), id="the oldest"),
        pytest.param([(5, 0), (700, 256)], [], Plan((), 0, (), ((0, 5), (1, 251))), id="packed"),
        pytest.param([(5, 5), (700, 0)], [], Plan((), 0, (0,), ((1, 64),)), id="beside decoding"),
        pytest.param([(5, 5), (70, 0), (70, 0), (90, 0)], [],
                     Plan((), 0, (0,), ((1, 70), (2, 70), (3, 52))), id="more wait than decode"),
        pytest.param([(5, 5), (6, 6), (70, 0), (90, 0), (9, 0)], [],
                     Plan((), 0, (0, 1), ((2, 70), (3, 26))), id="half as many more"),
        pytest.param([(5, 5)], [(4, 21)], Plan((), 0, (0,), ()), id="not enough blocks"),
        pytest.param([(5, 5)], [(4, 21), (3, 1)], Plan((), 0, (0,), ()), id="nobody overtakes"),
        pytest.param([(5, 5, 15, 2), (9, 9, 7, 3)], [(1, 1)], Plan((1,), 0, (0,), ()),
                     id="the youngest gives way"),
        pytest.param([(5, 5)], [(30, 3, 30)], Plan((), 1, (0, 1), ()), id="all of it cached"),
    ],
)  # fmt: skip
def test_plan(running: list[tuple[int, ...]], waiting: list[tuple[int, ...]], plan: Plan) -> None:
    found = schedule(
        [Running(*r) for r in running],
        [Waiting(*w) for w in waiting],
        num_places=max(2, len(running)),
        num_blocks=20,
    )
    assert found == plan


@dataclass
class Request:
    """A request of a random history."""

    arrival: int
    prompt: int
    output: int
    computed: int = 0
    produced: int = 0
    blocks: int = 0

    @property
    def context(self) -> int:
        return self.prompt + max(0, self.produced - 1)

    def wanted(self) -> int:
        return -(-(self.context + 1) // BLOCK)


@settings(max_examples=num_histories(400), deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 120), st.integers(1, 30)), max_size=20
    ),
    num_places=st.integers(1, 8),
    spare=st.integers(0, 20),
    rows=st.sampled_from([(16, 16), (72, 20), (256, 64)]),
)
def test_random_histories(
    shapes: list[tuple[int, int, int]], num_places: int, spare: int, rows: tuple[int, int]
) -> None:
    """As an engine would run them, with barely enough blocks for the largest request, or more."""
    requests = sorted((Request(*shape) for shape in shapes), key=lambda r: r.arrival)
    total = spare + max((-(-(r.prompt + r.output + 1) // BLOCK) for r in requests), default=1)
    arriving, waiting, running = list(requests), [], []
    finished: list[Request] = []
    step = 0
    while arriving or waiting or running:
        while arriving and arriving[0].arrival <= step:
            waiting.append(arriving.pop(0))
        used = sum(r.blocks for r in running)
        oldest = running[0] if running else None
        before = oldest.computed + oldest.produced if oldest else 0
        plan = schedule(
            [
                Running(r.context, r.computed,
                        r.wanted() - r.blocks if r.computed == r.context else 0, r.blocks)
                for r in running
            ],
            [Waiting(r.context, r.wanted()) for r in waiting],
            num_places=num_places,
            num_blocks=total - used,
            prefill_rows=rows[0],
            mixed_rows=rows[1],
        )  # fmt: skip
        for index in plan.preempted:
            assert index == len(running) - 1, "the youngest gives way"
            youngest = running.pop()
            youngest.computed = youngest.blocks = 0
            waiting.insert(0, youngest)
        assert not (plan.preempted and plan.num_admitted)
        for _ in range(plan.num_admitted):
            running.append(waiting.pop(0))
            running[-1].blocks = running[-1].wanted()
        assert len(running) <= num_places
        ready = [i for i, r in enumerate(running) if r.computed == r.context]
        assert list(plan.decode) == ready, "everyone past its context decodes in every step"
        computing = [i for i, _ in plan.prefill]
        assert computing == sorted(set(computing))
        assert not set(computing) & set(ready)
        crowd = max(1, (len(running) - len(ready)) / len(ready)) if ready else np.inf
        assert sum(n for _, n in plan.prefill) <= min(rows[0], rows[1] * crowd)
        assert bool(running) == bool(plan.decode or plan.prefill), "a step with work does some"
        for index, count in plan.prefill:
            r = running[index]
            assert 0 < count <= r.context - r.computed
            r.computed += count
            if r.computed == r.context and not r.produced:
                r.produced = 1
        for index in ready:
            r = running[index]
            r.blocks = r.wanted()
            r.produced += 1
            r.computed = r.context
        assert sum(r.blocks for r in running) <= total, "more blocks than there are"
        if oldest in running:
            assert oldest.computed + oldest.produced > before, "the oldest always goes on"
        finished += [r for r in running if r.produced >= r.output]
        running = [r for r in running if r.produced < r.output]
        step += 1
        assert step < 5000
    assert len(finished) == len(requests)


def test_a_waiting_request_is_never_overtaken() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        waiting = [Waiting(int(c), int(c) // 5) for c in rng.integers(1, 60, 6)]
        blocks = int(rng.integers(0, 30))
        plan = schedule([], waiting, num_places=4, num_blocks=blocks)
        needs = np.cumsum([w.blocks for w in waiting[:4]])
        assert plan.num_admitted == int(np.searchsorted(needs, blocks, side="right"))
