"""Where replays run: in this process, or spread over the tasks of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from valuspec.replay import Trajectory

_T = TypeVar("_T")

SHARDS_PER_WORKER = 2
"""More than one, so that a slow shard at the end does not keep the others waiting."""


class Workers(Protocol):
    """Runs one function over shards of the same trajectories."""

    @property
    def num_shards(self) -> int:
        """Into how many pieces to cut the work."""
        ...

    def map(
        self,
        function: Callable[[Sequence[Trajectory], Any], _T],
        trajectories: Sequence[Trajectory],
        shards: Sequence[Any],
        *,
        title: str,
    ) -> list[_T]:
        """`function(trajectories, shard)` for every shard, results in the order of the shards."""
        ...


class InProcess:
    """One after the other, here."""

    num_shards = 4  # for the progress bar alone

    def map(
        self,
        function: Callable[[Sequence[Trajectory], Any], _T],
        trajectories: Sequence[Trajectory],
        shards: Sequence[Any],
        *,
        title: str,
    ) -> list[_T]:
        return [function(trajectories, shard) for shard in _bar(shards, title)]


class OnRay:
    """One Ray task a shard; the trajectories travel once."""

    def __init__(self, num_workers: int) -> None:
        self.num_shards = SHARDS_PER_WORKER * num_workers
        self._stored: tuple[Sequence[Trajectory], Any] | None = None

    def map(
        self,
        function: Callable[[Sequence[Trajectory], Any], _T],
        trajectories: Sequence[Trajectory],
        shards: Sequence[Any],
        *,
        title: str,
    ) -> list[_T]:
        import ray

        if self._stored is None or self._stored[0] is not trajectories:
            self._stored = trajectories, ray.put(trajectories)
        task = ray.remote(num_cpus=1, max_retries=2)(function)
        place = {task.remote(self._stored[1], s): i for i, s in enumerate(shards)}
        results: dict[int, _T] = {}
        waiting = list(place)
        for _ in _bar(shards, title):
            (done,), waiting = ray.wait(waiting)
            results[place[done]] = ray.get(done)
        return [results[i] for i in range(len(shards))]


@contextmanager
def workers(count: int | None) -> Iterator[Workers]:
    """This process for a count of 1; else a Ray with so many CPUs.

    None decides by where this runs: in a Ray job, what is free of the cluster; elsewhere, this
    process.
    """
    if count == 1 or (count is None and "RAY_ADDRESS" not in os.environ):
        yield InProcess()
        return
    if "RAY_ADDRESS" in os.environ:
        import ray

        ray.init(log_to_driver=False)
    else:
        # Read by Ray when it is imported. The last one keeps its ports on the loopback address.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        ray.init(address="local", num_cpus=count, include_dashboard=False, log_to_driver=False)
    try:
        free = _free_cpus()
        if not free:  # a task would wait for ever, if the replicas have them all
            say("no CPU of the cluster is free: working in this process")
        yield OnRay(min(count or free, free)) if free else InProcess()
    finally:
        ray.shutdown()


def _free_cpus() -> int:
    import ray

    return int(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


async def in_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Like `asyncio.to_thread`, but nobody waits for the thread when the program is interrupted."""
    done: Future[_T] = Future()

    def work() -> None:
        done.set_running_or_notify_cancel()
        try:
            done.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(done)


def say(text: str) -> None:
    """One line of progress."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def _bar(shards: Sequence[Any], title: str) -> Iterator[Any]:
    """A bar on a terminal, gone when it is full; in a log file, a line."""
    if not sys.stderr.isatty():
        say(title)
        return iter(shards)
    return iter(tqdm(shards, desc=f"    {title}", unit="part", leave=False))
