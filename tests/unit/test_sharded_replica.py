"""What a replica of several ranks makes of their health, without Ray and without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from deployments import ranks
from deployments.ranks import Rank, Ranks, ShardedTargetReplica, end_process
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from tests.support.fake_engine import FakeEngine, FakeTarget
from valuspec.errors import ModelError, RankLostError

Check = Callable[[], Coroutine[Any, Any, None]]


async def well() -> None:
    return


async def dead() -> None:
    raise ray.exceptions.RayActorError


async def hung() -> None:
    await asyncio.Event().wait()


def stopped(tmp_path: Any) -> Check:
    """A rank whose process lives, but which follows nobody any more."""
    rank = Rank(AppArgs(model=str(tmp_path / "none")), 1, tmp_path, b"key")
    rank._listener.close()
    with pytest.raises(OSError, match="closed"):
        rank.follow()

    async def check() -> None:
        try:
            rank.check()
        except RankLostError as error:
            raise ray.exceptions.RayTaskError("check", "", error) from error

    return check


def replica(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> ShardedTargetReplica:
    """One with further ranks that answer so."""
    engine = FakeEngine(FakeTarget(), 2)
    replica = ShardedTargetReplica.__new__(ShardedTargetReplica)
    TargetReplica.__init__(replica, AppArgs(), None, None, lambda _: (engine.target, engine))
    replica._ranks = Ranks.__new__(Ranks)
    replica._ranks._actors = [
        SimpleNamespace(check=SimpleNamespace(remote=check)) for check in checks
    ]
    replica._ranks._leader = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(ranks, "HUNG_AFTER_S", 0.05)
    return replica


def test_a_replica_is_healthy_while_all_ranks_answer(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "end_process", lambda _: pytest.fail("healthy"))
    asyncio.run(replica(monkeypatch, well, well).check_health())


@pytest.mark.parametrize("how", [dead, hung, stopped])
def test_a_replica_ends_when_a_rank_is_lost(how, monkeypatch, tmp_path) -> None:
    ended = []
    monkeypatch.setattr(ranks, "end_process", ended.append)
    check = stopped(tmp_path) if how is stopped else how
    asyncio.run(replica(monkeypatch, well, check).check_health())
    (error,) = ended
    assert isinstance(error, RankLostError)


def test_ending_is_a_crash_that_the_log_explains(monkeypatch, caplog) -> None:
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    end_process(RankLostError("rank 1 has stopped"))
    assert codes == [1]
    assert "rank 1 has stopped" in caplog.text


def test_a_placement_group_of_another_size_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "check_split", lambda _: None)
    for group in (None, SimpleNamespace(bundle_count=3)):
        monkeypatch.setattr(ranks, "get_current_placement_group", lambda group=group: group)
        with pytest.raises(ModelError, match="placement_group_bundles must have as many"):
            Ranks(AppArgs(tensor_parallel_size=2))
