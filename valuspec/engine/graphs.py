"""Forwards of few rows, recorded once per width and replayed: CUDA graphs.

A decoding step is some ten kernels a layer, and on a GPU launching them one by one can take longer
than running them. A recording launches them all at once, but fixes shapes and addresses. So a step
is padded to one of a few widths, and what it reads is copied into the buffers it was recorded with.

Rows of padding repeat the first row. Attention neither stores their keys and values nor reads for
them, and their logits are thrown away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import torch

from valuspec.engine.attention import Attention
from valuspec.engine.decoder import Decoder, LeanDecoder
from valuspec.engine.kv_cache import Int64Array, KvCache
from valuspec.engine.rows import Rows, SequenceRows, build_rows
from valuspec.engine.two_zone import TwoZoneAttention

logger = logging.getLogger(__name__)

#: Rows of a recorded step; the widest holds a pending token and most of the largest tree.
WIDTHS = (4, 8, 16, 32, 64)

Run = Callable[[], torch.Tensor]
"""Computes from buffers filled before; what it returns is valid until the next run."""


class RefillableAttention(Attention, Protocol):
    """Attention whose buffers can be filled again for other rows."""

    @staticmethod
    def capacity(rows: Rows) -> int:
        """Rows of one padded width and one capacity may share buffers."""
        ...

    def refill(self, rows: Rows) -> None: ...


def graphs_for(
    decoder: Decoder, attention: type[Attention], device: torch.device
) -> StepGraphs | None:
    """Recorded steps where they pay and can be had.

    Not with matrix products for attention, whose shapes follow the context; not with transformers'
    modules, which may look at a tensor from the host, as a recording forbids.
    """
    lean = isinstance(decoder, LeanDecoder)
    if device.type != "cuda" or not lean or attention is TwoZoneAttention:
        return None
    return StepGraphs(decoder, cast(type[RefillableAttention], attention), CudaRecorder())


def step_width(num_rows: int, min_width: int) -> int | None:
    """The recorded width for so many rows; None if there is none so wide.

    min_width: of the target; where it is wider than all of WIDTHS it is the one width
    """
    widths = [w for w in WIDTHS if w >= min_width] or [min_width]
    return next((w for w in widths if w >= num_rows), None)


@dataclass(frozen=True, slots=True)
class _Step:
    """One recorded forward, and the buffers it reads."""

    rows: Rows
    attention: RefillableAttention
    run: Run

    def refill(self, rows: Rows) -> None:
        self.rows.token_ids.copy_(rows.token_ids)
        self.rows.positions.copy_(rows.positions)
        self.rows.logit_rows.copy_(rows.logit_rows)
        self.attention.refill(rows)


class StepGraphs:
    """Recorded forwards over one cache at a time."""

    def __init__(
        self,
        decoder: Decoder,
        attention: type[RefillableAttention],
        record: Callable[[Run], Run],
    ) -> None:
        """record: makes of a run one that does the same faster; the run itself would do"""
        self._decoder = decoder
        self._attention = attention
        self._record = record
        self._cache: KvCache | None = None
        self._steps: dict[tuple[int, int], _Step] = {}

    def forward(
        self, members: list[SequenceRows], logit_rows: Int64Array, cache: KvCache, width: int
    ) -> torch.Tensor:
        """See `Target.forward`; width: rows to pad to, from `step_width`."""
        rows = build_rows(members, logit_rows, torch.device("cpu"), min_width=width)
        if cache is not self._cache:  # another one's blocks lie at other addresses
            self._cache, self._steps = cache, {}
        key = width, self._attention.capacity(rows)
        if key not in self._steps:
            self._steps[key] = self._begin(rows, cache)
        step = self._steps[key]
        step.refill(rows)
        return step.run()[: len(logit_rows)].clone()

    def _begin(self, rows: Rows, cache: KvCache) -> _Step:
        token_ids, positions, wanted = (
            tensor.to(cache.device) for tensor in (rows.token_ids, rows.positions, rows.logit_rows)
        )
        buffers = replace(rows, token_ids=token_ids, positions=positions, logit_rows=wanted)
        attention = self._attention(buffers, cache)
        run = partial(self._decoder.forward, buffers, attention)
        return _Step(buffers, attention, self._record(run))


class CudaRecorder:
    """Records runs as CUDA graphs that share their memory; what CUDA refuses runs as it is."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        run()  # compiles kernels and opens libraries, which must not happen in a recording
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = run()
        except RuntimeError as error:
            logger.warning("a step cannot be recorded, its kernels run one by one: %s", error)
            return run

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
