"""A target replica of several ranks: processes of one node that share each forward's work.

The replica is rank 0: it has the engine, and clients know it alone. Every further rank is an actor
in the replica's placement group. Rank 0 tells them over sockets in a folder that only this user may
enter what to compute (`valuspec.engine.mirror`); partial sums go over NCCL, or gloo on a CPU.

A replica that has lost a rank cannot serve, and no rank can be put back into its place. It ends its
own process: requests go on with another replica, and Serve starts a new one with all of its ranks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.loading import Engine, Target, check_split, load_engine, load_target
from deployments.settings import AppArgs
from deployments.target import TargetReplica
from valuspec.errors import ModelError, RankLostError

logger = logging.getLogger(__name__)

#: A rank that does not answer for so long is hung. Serve itself waits 30 s for a health check.
HUNG_AFTER_S = 20.0


class Rank:
    """The actor of rank 1, 2, ..: holds a shard, and follows rank 0 for as long as it lives."""

    def __init__(self, args: AppArgs, rank: int, folder: Path, key: bytes) -> None:
        """key: proves to both ends of the socket that they belong together"""
        self._args, self._rank, self._folder = args, rank, folder
        self._listener = Listener(str(_socket(folder, rank)), authkey=key)
        self._following = True

    def ready(self) -> None:
        """Return once the socket is open."""

    def follow(self) -> None:
        """Load the shard and do what rank 0 says, until it is gone. Raises as loading does."""
        from valuspec.engine.mirror import follow

        try:
            with self._listener:
                leader = self._listener.accept()
            with leader:
                group = _join(self._args, self._folder, self._rank)
                follow(load_target(self._args, group=group), leader)
        finally:
            self._following = False

    def check(self) -> None:
        if not self._following:
            raise RankLostError(f"rank {self._rank} has stopped")


class Ranks:
    """Rank 0's hold on the others. They end when it goes."""

    def __init__(self, args: AppArgs) -> None:
        """Start the actors, one in each further bundle of this actor's placement group.

        Raises ModelError when the model cannot be split, before anything is started.
        """
        check_split(args)
        group = get_current_placement_group()
        if group is None or group.bundle_count != args.tensor_parallel_size:
            raise ModelError(
                f"tensor_parallel_size is {args.tensor_parallel_size}: the Target deployment's "
                "placement_group_bundles must have as many bundles, one for each rank"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="valuspec-ranks-")
        self._key = secrets.token_bytes(32)
        folder = Path(self._folder.name)
        self._numbers = range(1, args.tensor_parallel_size)
        self._actors: list[Any] = [
            ray.remote(Rank)
            .options(
                num_cpus=0,  # the bundle reserves them
                num_gpus=int(args.device == "cuda"),
                max_concurrency=2,  # answers `check` while it follows
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            )
            .remote(args, number, folder, self._key)
            for number in self._numbers
        ]

    def load_engine(self, args: AppArgs) -> tuple[Target, Engine]:
        """As `deployments.loading.load_engine`, on all ranks. Raises what any of them raises."""
        from valuspec.engine.mirror import Leader

        folder = Path(self._folder.name)
        ray.get([actor.ready.remote() for actor in self._actors])
        following = [actor.follow.remote() for actor in self._actors]
        channels: list[Connection] = [
            Client(str(_socket(folder, number)), authkey=self._key) for number in self._numbers
        ]
        self._leader = Leader(channels)
        try:
            loaded = load_engine(args, group=_join(args, folder, 0), leader=self._leader)
        except Exception:
            # Why a rank is lost, it says itself.
            for ended in ray.wait(following, timeout=1)[0]:
                ray.get(ended)
            raise
        self._folder.cleanup()  # all have met
        self._leader.on_loss = end_process
        return loaded

    async def check(self) -> None:
        """Raise RankLostError if a rank is dead or hung."""
        try:
            async with asyncio.timeout(HUNG_AFTER_S):
                await asyncio.gather(*(actor.check.remote() for actor in self._actors))
        except TimeoutError:
            raise RankLostError(f"a rank has not answered for {HUNG_AFTER_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise RankLostError(f"a rank of this replica is lost: {error!r}") from error

    def close(self) -> None:
        self._leader.close()


class ShardedTargetReplica(TargetReplica):
    """A target replica whose engine computes on several ranks."""

    def __init__(
        self,
        args: AppArgs,
        retrieval: DeploymentHandle[Any] | None,
        valuation: DeploymentHandle[Any] | None,
    ) -> None:
        self._ranks = Ranks(args)
        super().__init__(args, retrieval, valuation, self._ranks.load_engine)

    async def check_health(self) -> None:  # type: ignore[override]  # Serve awaits either kind
        """Serve's hook: the engine's progress, and that every rank is there."""
        try:
            await self._ranks.check()
        except RankLostError as error:
            end_process(error)
        super().check_health()

    def __del__(self) -> None:
        super().__del__()
        self._ranks.close()


def end_process(error: RankLostError) -> None:
    """End this replica at once, as a crash: whatever waits for it goes to another replica."""
    logger.critical("this replica ends: %s", error)
    logging.shutdown()
    os._exit(1)


def _join(args: AppArgs, folder: Path, rank: int) -> Any:
    import torch

    from valuspec.engine.ranks import RankGroup

    # NCCL finds its peers over a socket: nobody else need reach it.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Ray shows each rank its own GPU alone.
    device = torch.device(args.device)
    return RankGroup(folder / "meeting", rank, args.tensor_parallel_size, device)


def _socket(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
