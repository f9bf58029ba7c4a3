"""Ranks that compute one forward together, and the one thing they exchange in it: sums.

A layer whose inputs are split among ranks gives each a partial result. Library all-reduces add
those in an order that depends on how many elements there are, so a row's bits would depend on its
company. Here every rank gathers all partial results and adds them in the order of the ranks.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

#: Its type stubs miss or misname much of what is used here.
_distributed: Any = torch.distributed
#: Greatest wait for another rank inside a forward; a rank that takes longer is lost. In its first
#: forward a rank compiles.
TIMEOUT_S = 120.0


class RankGroup:
    """This process's membership in a group of `size` ranks on one machine.

    rank:   0 to size - 1; rank 0 decides what is computed and alone has logits
    device: where tensors to be summed lie: CPU (gloo, over the loopback address) or CUDA (NCCL)
    """

    def __init__(
        self,
        meeting: Path,
        rank: int,
        size: int,
        device: torch.device,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Meet the other ranks at `meeting`, a file that does not exist before the first comes.

        Raises RuntimeError when they do not come within `timeout_s`.
        """
        self.rank = rank
        self.size = size
        self.device = device
        timeout = timedelta(seconds=timeout_s)
        store = _distributed.FileStore(str(meeting), size)
        store.set_timeout(timeout)
        # A group of its own, not the process's default one: tests run several in one process.
        if device.type == "cuda":
            kind = _distributed.ProcessGroupNCCL
            options = kind.Options()
        else:
            kind = _distributed.ProcessGroupGloo
            options = kind._Options()
            # By default gloo listens on the address that the host's name stands for.
            options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        self._backend = kind(store, rank, size, options)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' partial results [num_rows, size]; the same bits on every rank.

        Added in fp32 and rounded once. Raises RuntimeError when a rank is lost.
        """
        gathered = partial.new_empty((self.size * len(partial), partial.shape[1]))
        self._backend._allgather_base(gathered, partial.contiguous()).wait()
        first, *others = gathered.chunk(self.size)
        total = first.float()
        for part in others:
            total += part
        return total.to(partial.dtype)


class RowSplitLinear:
    """A linear layer of which every rank holds the weights of some inputs."""

    def __init__(self, share: Any, group: RankGroup) -> None:
        """share: [num_rows, a rank's inputs] -> [num_rows, outputs], a partial result"""
        self._share = share
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.sum(self._share(x))
