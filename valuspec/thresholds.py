"""A threshold set: everything valuation has learned about one target model, as a value."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valuspec import evidence
from valuspec.cost import CostStaircase
from valuspec.drafting import candidates
from valuspec.errors import ThresholdError

SCHEMA = 1
SMOOTHING = 16.0
"""Weight k of the coarser signature's rate in (taken + k * prior) / (seen + k)."""
PRIOR = 0.1
"""Transfer rate assumed where nothing at all was seen."""
MAX_NODES = 1024
"""Largest tree the cost tables reach; larger trees keep at most this many nodes."""
BELIEVED = (
    np.append(evidence.PROBABILITY_EDGES, 1.0)
    - np.diff(evidence.PROBABILITY_EDGES, prepend=0.0, append=1.0) / 2
)
"""Transfer rate assumed by bucket of draft probability: its middle."""
STARTING_SET = Path(__file__).parent / "data" / "smollm2-135m-instruct.json"

Counts = NDArray[np.int64]


def signature_scheme() -> str:
    """Hash of the bucket edges and of what shares weigh: other rates mean something else."""
    edges = [evidence.SHARE_EDGES, evidence.OWN_SHARE_EDGES, evidence.COUNT_EDGES,
             evidence.LENGTH_EDGES, evidence.DEPTH_EDGES, evidence.PROBABILITY_EDGES,
             evidence.RANK_EDGES, evidence.AGREEMENT_EDGES]  # fmt: skip
    weights = [candidates.MATCH_WEIGHT, candidates.AGREEMENT_WEIGHT]
    text = json.dumps([[e.tolist() for e in [*edges, *weights]], evidence.SHAPE])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class BatchBucket:
    """What decides for batches of up to `max_batch_size` requests (the last bucket: any batch)."""

    max_batch_size: int
    tau: float
    """Nodes valued below are not verified, however cheap; 0 to 1."""
    stream_tok_s: float
    """Tokens per second one request reaches: the price of a second, in expected tokens."""
    cost: CostStaircase

    def __post_init__(self) -> None:
        """Raise ThresholdError naming the value out of range."""
        if self.max_batch_size < 1:
            raise ThresholdError(f"max_batch_size is {self.max_batch_size}; at least 1 expected")
        if not 0.0 <= self.tau <= 1.0:  # also refuses NaN
            raise ThresholdError(f"tau is {self.tau}; it must be between 0 and 1")
        if not (math.isfinite(self.stream_tok_s) and self.stream_tok_s > 0):
            raise ThresholdError(f"stream_tok_s is {self.stream_tok_s}; it must be positive")


@dataclass(frozen=True, eq=False)
class ThresholdSet:
    """Transfer counts by signature and the thresholds per batch size. Immutable.

    Sets with equal content have equal `version`s. A set decides which nodes are proposed to the
    target and nothing else: it offers node indices, and acceptance never reads it.
    """

    model_fingerprint: str
    seen: Counts
    """Edges whose parent the target's trajectory reached, int64 [NUM_CODES]."""
    taken: Counts
    """Those the trajectory went on along, int64 [NUM_CODES]."""
    buckets: tuple[BatchBucket, ...]
    """Ascending in max_batch_size."""
    min_similarity: float = 0.0
    """Draft trees of requests less similar than this are not used; cosine, -1 to 1."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How the set came about; JSON values, part of the version."""
    local_costs: Mapping[int, CostStaircase] = field(default_factory=dict)
    """Verify costs of the machine that uses the set, by largest batch size; not part of the set.
    Where there are any, they count in place of those the set was made with."""

    def __post_init__(self) -> None:
        """Raise ThresholdError giving the reason the set cannot be used."""
        for counts in (self.seen, self.taken):
            if counts.shape != (evidence.NUM_CODES,):
                raise ThresholdError(
                    f"{counts.shape} transfer counts; {evidence.NUM_CODES} expected"
                )
            counts.setflags(write=False)
        if self.taken.min() < 0 or np.any(self.taken > self.seen):
            raise ThresholdError("transfer counts must satisfy 0 <= taken <= seen")
        sizes = [b.max_batch_size for b in self.buckets]
        if not sizes or sizes != sorted(set(sizes)):
            raise ThresholdError(f"batch buckets {sizes} must be at least one, ascending")
        if not -1.0 <= self.min_similarity <= 1.0:
            raise ThresholdError(f"min_similarity is {self.min_similarity}; -1 to 1 expected")

    # -- use ------------------------------------------------------------------------------------

    def bucket_index(self, batch_size: int) -> int:
        """Index of the bucket that decides for a batch; larger batches use the last one."""
        for index, bucket in enumerate(self.buckets):
            if batch_size <= bucket.max_batch_size:
                return index
        return len(self.buckets) - 1

    @cached_property
    def rates(self) -> NDArray[np.float32]:
        """Transfer rate by signature code, float32 [NUM_CODES], smoothed with back-off."""
        cut = evidence.NUM_OCCURRENCE_CODES
        parts = [
            smoothed(self.seen[:cut].reshape(evidence.SHAPE),
                      self.taken[:cut].reshape(evidence.SHAPE)),
            smoothed(self.seen[cut:].reshape(evidence.DRAFT_MODEL_SHAPE),
                      self.taken[cut:].reshape(evidence.DRAFT_MODEL_SHAPE), BELIEVED),
        ]  # fmt: skip
        return np.concatenate([p.ravel() for p in parts]).astype(np.float32)

    @cached_property
    def prices(self) -> NDArray[np.float64]:
        """Expected tokens b nodes must bring behind CONTEXT tokens and fewer, float64
        [num_buckets, MAX_NODES + 1]."""
        tables = [b.stream_tok_s * b.cost.table(MAX_NODES + 1) for b in self._local_buckets]
        return np.stack([t - t[0] for t in tables])

    def prices_behind(self, bucket: int, contexts: Any) -> tuple[Any, Any]:
        """Of b nodes behind so many tokens: scale * `prices` + slope * b; (scale, slope).

        The more tokens lie before a step, the slower is a stream, and the less a second is worth.
        """
        local = self._local_buckets[bucket]
        plain = local.cost.seconds[0]
        scale = plain / (plain + local.cost.extra(1, contexts))
        for_each_row = local.cost.extra(1, contexts) - local.cost.extra(0, contexts)
        return scale, local.stream_tok_s * scale * for_each_row

    def tokens_of(self, seconds: float, *, batch_size: int) -> float:
        """Tokens one request gains in so many seconds: what work that takes them must bring."""
        return seconds * self._local_buckets[self.bucket_index(batch_size)].stream_tok_s

    def plain_step_s(self, batch_size: int, context: int = 0) -> float:
        """Seconds a step of a batch takes without any draft, behind so many tokens each."""
        cost = self._local_buckets[self.bucket_index(batch_size)].cost
        return cost.seconds[0] + float(cost.extra(1, context))

    @cached_property
    def _local_buckets(self) -> tuple[BatchBucket, ...]:
        """The buckets at local costs. A stream is taken to gain as much over plain decoding here
        as where the set was made."""
        costs, local = self.local_costs, []
        for bucket in self.buckets:
            sizes = [size for size in costs if size >= bucket.max_batch_size]
            cost = costs[min(sizes) if sizes else max(costs)] if costs else bucket.cost
            speed = bucket.cost.seconds[0] / cost.seconds[0]
            local.append(replace(bucket, cost=cost, stream_tok_s=bucket.stream_tok_s * speed))
        return tuple(local)

    def with_draft_model_of(self, other: ThresholdSet) -> ThresholdSet:
        """This set, with what the other knows of a draft model's edges."""
        cut = evidence.NUM_OCCURRENCE_CODES
        return replace(
            self,
            seen=np.concatenate([self.seen[:cut], other.seen[cut:]]),
            taken=np.concatenate([self.taken[:cut], other.taken[cut:]]),
        )

    def validate(self, *, model_fingerprint: str) -> ThresholdSet:
        """Return self, or raise ThresholdError if the set was made for another model."""
        if model_fingerprint != self.model_fingerprint:
            raise ThresholdError(
                f"threshold set {self.version} is of model {self.model_fingerprint}, "
                f"this is {model_fingerprint}; recalibrate for this model"
            )
        return self

    # -- storage --------------------------------------------------------------------------------

    @cached_property
    def version(self) -> str:
        """Content hash."""
        return hashlib.sha256(_canonical(self._content()).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return _canonical({**self._content(), "version": self.version})

    @classmethod
    def from_json(cls, text: str | bytes) -> ThresholdSet:
        """Parse and check; raises ThresholdError with the reason."""
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                found = data.get("schema") if isinstance(data, dict) else type(data).__name__
                raise ThresholdError(f"schema version {found}; {SCHEMA} expected")
            if data["signatures"] != signature_scheme():
                raise ThresholdError(
                    f"signature buckets {data['signatures']}; this build has {signature_scheme()}"
                )
            transfers = data["transfers"]
            loaded = cls(
                model_fingerprint=str(data["model_fingerprint"]),
                seen=_dense(transfers["codes"], transfers["seen"]),
                taken=_dense(transfers["codes"], transfers["taken"]),
                buckets=tuple(_bucket(b) for b in data["buckets"]),
                min_similarity=float(data["min_similarity"]),
                provenance=data["provenance"],
            )
        except ThresholdError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ThresholdError(f"not a threshold set: {type(error).__name__}: {error}") from error
        if data.get("version") != loaded.version:
            raise ThresholdError(
                f"content hashes to {loaded.version}, the set says {data.get('version')}"
            )
        return loaded

    @classmethod
    def load(cls, path: str | Path) -> ThresholdSet:
        """Read a set from a JSON file; raises ThresholdError, also when it cannot be read."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ThresholdError(f"cannot read threshold set {path}: {error}") from error
        return cls.from_json(text)

    @classmethod
    def starting(cls, model_fingerprint: str) -> ThresholdSet:
        """The shipped set, for a model that has not been calibrated yet.

        It was made from SmolLM2-135M-Instruct. How far repeated text carries over depends little
        on the model, so it is a fair start for another one, and the provenance says so.
        """
        shipped = cls.load(STARTING_SET)
        if shipped.model_fingerprint == model_fingerprint:
            return shipped
        return cls(
            model_fingerprint=model_fingerprint,
            seen=shipped.seen,
            taken=shipped.taken,
            buckets=shipped.buckets,
            min_similarity=shipped.min_similarity,
            provenance={**shipped.provenance, "borrowed_from": shipped.version},
        )

    def _content(self) -> dict[str, Any]:
        codes = np.flatnonzero(self.seen)
        return {
            "schema": SCHEMA,
            "signatures": signature_scheme(),
            "model_fingerprint": self.model_fingerprint,
            "transfers": {
                "codes": codes.tolist(),
                "seen": self.seen[codes].tolist(),
                "taken": self.taken[codes].tolist(),
            },
            "buckets": [
                {
                    "max_batch_size": b.max_batch_size,
                    "tau": b.tau,
                    "stream_tok_s": b.stream_tok_s,
                    "cost": b.cost.to_json(),
                }
                for b in self.buckets
            ],
            "min_similarity": self.min_similarity,
            "provenance": dict(self.provenance),
        }


def smoothed(
    seen: Counts, taken: Counts, believed: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Rates of the full signature; the prior of each is the rate with its last axis summed out.

    believed: rates by the first axis, in place of the one rate of all edges together
    """
    rate = np.asarray((taken.sum() + SMOOTHING * PRIOR) / (seen.sum() + SMOOTHING))
    for axes in range(1, seen.ndim + 1):
        coarser = tuple(range(axes, seen.ndim))
        prior = believed if axes == 1 and believed is not None else rate[..., None]
        rate = (taken.sum(coarser) + SMOOTHING * prior) / (seen.sum(coarser) + SMOOTHING)
    return rate


def _dense(codes: Sequence[int], counts: Sequence[int]) -> Counts:
    where = np.asarray(codes, np.int64)
    if len(where) and (where.min() < 0 or where.max() >= evidence.NUM_CODES):
        raise ThresholdError(f"signature codes span {where.min()}..{where.max()}")
    if len(np.unique(where)) != len(where) or len(codes) != len(counts):
        raise ThresholdError("signature codes must be distinct, with one count each")
    dense = np.zeros(evidence.NUM_CODES, np.int64)
    dense[where] = np.asarray(counts, np.int64)
    return dense


def _bucket(data: dict[str, Any]) -> BatchBucket:
    return BatchBucket(
        max_batch_size=int(data["max_batch_size"]),
        tau=float(data["tau"]),
        stream_tok_s=float(data["stream_tok_s"]),
        cost=CostStaircase.from_json(data["cost"]),
    )


def _refuse_constant(name: str) -> float:
    raise ThresholdError(f"{name} is not a number a threshold set may hold")


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
