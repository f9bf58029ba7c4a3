"""The autoscaling policy: a pure function, and what Serve's context is read as."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingPolicy

from deployments.autoscaling import LOAD_METRIC, LoadPolicy, load, replicas_wanted
from deployments.messages import GenerateCall
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from tests.support.fake_engine import FakeEngine, FakeTarget
from valuspec.engine.types import SamplingParams

LIMITS = {"max_batch_size": 8, "kv_tokens": 4000}
LOADS = st.lists(st.floats(0, 20), min_size=1, max_size=20)
TARGETS = st.fixed_dictionaries({"target_load": st.floats(0.1, 4), "slack": st.floats(0, 0.9)})


def context(loads: dict[str, float], **fields):
    fields = {
        "running_replicas": list(loads),
        "current_num_replicas": len(loads),
        "target_num_replicas": len(loads),
    } | fields
    return SimpleNamespace(aggregated_metrics={LOAD_METRIC: loads}, **fields)


def test_the_scarcer_of_places_and_cache_is_the_load() -> None:
    assert load(8, 400, **LIMITS) == 1.0, "many short requests: the batch is full"
    assert load(2, 4000, **LIMITS) == 1.0, "two long ones: the cache is"
    assert load(16, 400, **LIMITS) == 2.0, "as many wait as run"
    assert load(0, 0, **LIMITS) == 0.0


@given(LOADS, TARGETS)
def test_so_many_that_each_carries_the_target(loads, targets) -> None:
    wanted = replicas_wanted(loads, len(loads), **targets)
    if wanted > len(loads):
        assert sum(loads) / wanted == pytest.approx(targets["target_load"])


@given(LOADS, TARGETS, st.floats(0, 5))
def test_more_load_never_wants_fewer(loads, targets, more) -> None:
    before = replicas_wanted(loads, len(loads), **targets)
    assert replicas_wanted([loads[0] + more, *loads[1:]], len(loads), **targets) >= before - 1e-9


@given(LOADS, TARGETS)
def test_what_was_given_up_is_not_wanted_back_at_once(loads, targets) -> None:
    """After scaling down by the rule, the same load must not scale up again."""
    wanted = replicas_wanted(loads, len(loads), **targets)
    if wanted < len(loads):
        left = max(1, -int(-wanted // 1))
        share = [sum(loads) / left] * left
        assert replicas_wanted(share, left, **targets) <= left + 1e-9


def test_a_load_near_the_boundary_neither_starts_nor_stops_a_replica() -> None:
    policy = LoadPolicy(target_load=1.0, slack=0.2)
    for total in (1.7, 1.9, 2.0):
        assert policy(context({"a": total / 2, "b": total / 2}))[0] == 2
    assert policy(context({"a": 1.05, "b": 1.05}))[0] > 2
    assert policy(context({"a": 0.39, "b": 0.39}))[0] <= 1


def test_replicas_that_are_gone_or_silent_count_nothing() -> None:
    policy = LoadPolicy(target_load=1.0)
    gone = context({"a": 1.0, "dead": 9.0}, running_replicas=["a"], current_num_replicas=1)
    assert policy(gone)[0] == 1
    fresh = context({"a": 3.0}, running_replicas=["a", "new"], current_num_replicas=2)
    assert policy(fresh)[0] == 3
    unknown = context({}, running_replicas=["a"], current_num_replicas=1, target_num_replicas=4)
    assert policy(unknown)[0] == 4
    unknown.aggregated_metrics = None
    assert policy(unknown)[0] == 4


@pytest.mark.parametrize("wrong", [{"target_load": 0}, {"slack": 1.0}, {"slack": -0.1}])
def test_senseless_targets_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="target_load"):
        LoadPolicy(**wrong)


def test_serve_finds_the_policy_by_name() -> None:
    policy = AutoscalingPolicy(
        policy_function="deployments.autoscaling:LoadPolicy", policy_kwargs={"slack": 0.1}
    )
    assert policy.get_policy()(**policy.policy_kwargs)(context({"a": 4.0}))[0] == 5


def test_a_replica_reports_what_it_has_to_do() -> None:
    engine = FakeEngine(FakeTarget())
    engine.hold_after_step = 1
    args = AppArgs(model="fake", max_batch_size=2)
    replica = TargetReplica(args, None, None, load=lambda _: (engine.target, engine))
    call = GenerateCall(
        request_id="r", tenant="t", params=SamplingParams(), max_tokens=4, prompts=("a", "b"), n=2
    )
    shown: dict[str, float] = {}
    replica._telemetry.gauge = shown.__setitem__

    async def loads() -> list[float]:
        replies = replica.generate(call)
        seen = [replica.record_autoscaling_stats()[LOAD_METRIC]]
        async for _ in replies:
            seen.append(replica.record_autoscaling_stats()[LOAD_METRIC])
            replica.check_health()
            assert shown["valuspec_load"] == seen[-1]
            engine.gate.set()
        return [*seen, replica.record_autoscaling_stats()[LOAD_METRIC]]

    try:
        seen = asyncio.run(loads())
    finally:
        replica._loop.stop()
    assert seen[0] == seen[-1] == 0.0
    assert max(seen) == 2.0, "four choices for two places"
