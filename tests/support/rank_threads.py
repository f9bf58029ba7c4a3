"""A target split among ranks that are threads of this process, over real gloo."""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import EOS, byte_tokenizer
from valuspec.engine.mirror import Channel, Leader, follow
from valuspec.engine.ranks import RankGroup
from valuspec.engine.target import Target

CPU = torch.device("cpu")


class Ranks:
    """Of one target; `targets[0]` leads, `channels[i]` is the end of rank i + 1."""

    def __init__(
        self,
        model: Any,
        num_ranks: int,
        meeting: Path,
        *,
        dtype: torch.dtype = torch.float32,
        timeout_s: float = 60,
        through: Callable[[Connection], Channel] = lambda channel: channel,
    ) -> None:
        """through: what the other ranks see of their channels"""
        self._model, self._dtype = model, dtype
        self._meeting, self._timeout_s = meeting, timeout_s
        self.num_ranks = num_ranks
        self.targets: dict[int, Target] = {}
        self.errors: list[Exception] = []
        pairs = [Pipe() for _ in range(num_ranks - 1)]
        self.channels = [through(theirs) for _, theirs in pairs]
        self.threads = [
            threading.Thread(target=self._follow, args=(rank, channel), daemon=True)
            for rank, channel in enumerate(self.channels, 1)
        ]
        for thread in self.threads:
            thread.start()
        self.leader = Leader([ours for ours, _ in pairs])
        target = self._load(0)
        self.leader.await_others(target.model_fingerprint)
        target.leader = self.leader
        self.target = target

    def _load(self, rank: int) -> Target:
        group = RankGroup(self._meeting, rank, self.num_ranks, CPU, timeout_s=self._timeout_s)
        model = copy.deepcopy(self._model).to(self._dtype)
        target = Target.from_model(model, byte_tokenizer() if rank == 0 else None, group)
        target.eos_token_ids = frozenset({EOS})
        self.targets[rank] = target
        return target

    def _follow(self, rank: int, channel: Channel) -> None:
        try:
            follow(self._load(rank), channel)
        except Exception as error:  # noqa: BLE001 - shown by the test
            # What it holds on to would keep the connections of its group open.
            self.errors.append(error.with_traceback(None))
        finally:
            del self.targets[rank]

    def end(self) -> None:
        """Let the other ranks go, and wait until they have."""
        self.leader.close()
        for thread in self.threads:
            thread.join()


@contextmanager
def ranks_of(model: Any, num_ranks: int = 2, **options: Any) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(model, num_ranks, Path(folder) / "meeting", **options)
        try:
            yield ranks
        finally:
            ranks.end()
