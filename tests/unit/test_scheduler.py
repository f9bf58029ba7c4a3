"""The scheduler over random histories: nobody starves, nobody is forgotten, no limit is broken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from valuspec.engine.scheduler import Plan, Running, schedule


@pytest.mark.parametrize(
    ("running", "waiting", "plan"),
    [
        pytest.param([], [], Plan(0, (), None), id="idle"),
        pytest.param([], [10], Plan(1, (), (0, 0, 10)), id="first request"),
        pytest.param([], [700], Plan(1, (), (0, 0, 256)), id="long prompt, first chunk"),
        pytest.param([(700, 512)], [], Plan(0, (), (0, 512, 700)), id="long prompt, last chunk"),
        pytest.param([(5, 5), (9, 9)], [], Plan(0, (0, 1), None), id="all decode"),
        pytest.param([(5, 5), (9, 9)], [4], Plan(0, (0, 1), None), id="no place free"),
        pytest.param([(5, 5)], [4, 3], Plan(1, (0,), (1, 0, 4)), id="the oldest gets the place"),
        pytest.param([(5, 0), (700, 256)], [], Plan(0, (), (1, 256, 512)),
                     id="a prompt once begun is finished first"),
    ],
)  # fmt: skip
def test_plan(running: list[tuple[int, int]], waiting: list[int], plan: Plan) -> None:
    assert schedule([Running(*r) for r in running], waiting, max_batch_size=2) == plan


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 900), st.integers(1, 12)), max_size=25
    ),
    max_batch_size=st.integers(1, 8),
    prefill_chunk=st.sampled_from([16, 72, 256]),
    seed=st.integers(0, 100),
)
def test_random_histories(
    requests: list[tuple[int, int, int]], max_batch_size: int, prefill_chunk: int, seed: int
) -> None:
    """requests: (steps until it comes, prompt tokens, steps it decodes)."""
    rng = np.random.default_rng(seed)
    arrivals = sorted(range(len(requests)), key=lambda i: requests[i][0])
    waiting: list[int] = []
    places: list[int] = []  # place -> request
    computed = dict.fromkeys(arrivals, 0)
    left = {i: requests[i][2] for i in arrivals}
    served: list[int] = []
    admitted: list[int] = []
    work = sum(-(-length // prefill_chunk) + decode for _, length, decode in requests)
    for step in range(work + 40):
        while arrivals and requests[arrivals[0]][0] <= step:
            waiting.append(arrivals.pop(0))
        had_work = bool(waiting or places)
        plan = schedule(
            [Running(requests[i][1], computed[i]) for i in places],
            [requests[i][1] for i in waiting],
            max_batch_size=max_batch_size,
            prefill_chunk=prefill_chunk,
        )
        for _ in range(plan.num_admitted):
            places.append(waiting.pop(0))
            admitted.append(places[-1])
        assert len(places) <= max_batch_size
        assert not waiting or len(places) == max_batch_size, "a place stays free"
        ready = [p for p, i in enumerate(places) if computed[i] == requests[i][1]]
        assert list(plan.decode) == ready, "everyone past its prompt decodes in every step"
        if plan.prefill is None:
            assert len(ready) == len(places)
        else:
            place, first, last = plan.prefill
            request = places[place]
            assert first == computed[request], "chunks are contiguous"
            assert first < last <= min(first + prefill_chunk, requests[request][1])
            computed[request] = last
        assert had_work == bool(plan.decode or plan.prefill), "a step with work does some"
        for place in ready:
            left[places[place]] -= 1
        ended = [i for i in places if left[i] == 0]
        if places and rng.random() < 0.1:  # a client leaves
            ended.append(places[int(rng.integers(len(places)))])
        for request in dict.fromkeys(ended):
            places.remove(request)
            served.append(request)
    assert sorted(served) == sorted(range(len(requests))), "somebody was never served"
    order = sorted(range(len(requests)), key=lambda i: requests[i][0])
    assert admitted == order, "first come, first admitted"
