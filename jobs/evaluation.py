"""What thresholds are worth on answers they were not made from, and what else could be done.

Everything here is replay: speedups are over plain decoding, of decoding alone. What drafts and
valuation take is in the verify costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from jobs.findings import Bucket, Comparison, Evaluation, Group, Mode
from jobs.history import Split, tenant_weights
from jobs.simulation import NodeRecords, Replayed, Scenario, examine, simulate
from jobs.workers import Workers
from valuspec import replay
from valuspec.calibration import score
from valuspec.cost import CostStaircase
from valuspec.evidence import Source
from valuspec.replay import Select, Trajectory
from valuspec.thresholds import ThresholdSet

FREQUENCY_SIZES = (4, 6, 8, 12, 16, 24, 32)
CHAIN_LENGTHS = (2, 3, 4, 5, 6, 8, 12)
CURVE_TAUS = (0.0, 0.01, 0.02, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.75, 1.0)
CURVE_MODES = ("chain", "frequency", "filtered")
RESAMPLES = 2000

Run = Callable[[Scenario, Mapping[str, Select], str], dict[str, Replayed]]
"""(what to serve, ways of choosing nodes, title) -> counts by way."""


def evaluate(
    trajectories: Sequence[Trajectory],
    split: Split,
    thresholds: ThresholdSet,
    previous: ThresholdSet,
    workers: Workers,
    *,
    costs: Mapping[int, CostStaircase],
    batch_shares: Mapping[int, float],
    num_trees: int,
) -> Evaluation:
    """Serve the evaluation part of `split` again and again, each time choosing nodes differently.

    previous:     the set in use
    costs:        verify cost by largest batch size
    batch_shares: share of the traffic's steps by batch size
    """

    def run(scenario: Scenario, selects: Mapping[str, Select], title: str) -> dict[str, Replayed]:
        parts = workers.map(
            lambda answers, shard: simulate(answers, shard, selects),
            trajectories,
            scenario.shards(workers.num_shards),
            title=title,
        )
        return {name: Replayed.concatenate([p[name] for p in parts]) for name in selects}

    costs = dict(sorted(costs.items()))
    cost = costs[min(costs)]
    known = Scenario(range(split.evaluation.start), split.evaluation, num_trees=num_trees)
    learning = Scenario(split.history, split.calibration, num_trees=num_trees)
    modes: dict[str, Select] = {
        **_rivals(learning, cost, run),
        "filtered": replay.filtered(thresholds),
        "oracle": replay.oracle,
    }
    taus = sorted({*CURVE_TAUS, thresholds.buckets[0].tau})
    variants = {f"tau {tau}": replay.filtered(_with_tau(thresholds, tau)) for tau in taus}
    for name, used in (("new", thresholds), ("previous", previous)):
        variants |= {f"{name} {b}": replay.filtered(used, batch_size=b) for b in costs}
    served = run(known, modes | variants, "held-out answers")
    alone = run(replace(known, num_trees=0), modes, "without retrieval")
    curve = _history_curve(known, {n: modes[n] for n in CURVE_MODES}, cost, run)
    nodes = NodeRecords.concatenate(
        workers.map(
            lambda answers, shard: examine(answers, shard, thresholds, modes["filtered"]),
            trajectories,
            known.shards(workers.num_shards),
            title="candidate nodes",
        )
    )
    tenants = [trajectories[i].namespace for i in split.evaluation]
    weights = tenant_weights(tenants)
    shares = _shares(batch_shares, costs)
    return Evaluation(
        num_tokens=int(served["filtered"].tokens.sum()),
        modes=[Mode.of(name, served[name], cost, weights) for name in modes],
        without_retrieval=[Mode.of(name, alone[name], cost, weights) for name in modes],
        history_curve=curve,
        tau_curve=[(tau, served[f"tau {tau}"].speedup(cost, weights)) for tau in taus],
        buckets=[
            Bucket(
                size,
                shares[size],
                thresholds.buckets[thresholds.bucket_index(size)].tau,
                1 / at_size.seconds[0],
                served[f"new {size}"].speedup(at_size, weights),
                served[f"previous {size}"].speedup(at_size, weights),
                at_size,
            )
            for size, at_size in costs.items()
        ],
        comparison=_compare(served, costs, shares, weights),
        tenants=_by_tenant(tenants, weights, served["filtered"], cost),
        reliability=score(nodes.value, nodes.taken),
        by_depth=_by_depth(nodes),
        by_source=_by_source(nodes),
    )


def _rivals(learning: Scenario, cost: CostStaircase, run: Run) -> dict[str, Select]:
    """What one would do without valuation, each at its best size on the calibration part."""
    chains = {f"{n} in a row": replay.longest_match(n) for n in CHAIN_LENGTHS}
    trees = {f"{n} nodes": replay.most_frequent(n) for n in FREQUENCY_SIZES}
    tried = run(learning, chains | trees, "rivals")

    def best(choices: Mapping[str, Select]) -> Select:
        return choices[max(choices, key=lambda name: tried[name].speedup(cost))]

    return {"unfiltered": replay.unfiltered, "chain": best(chains), "frequency": best(trees)}


def _history_curve(
    known: Scenario, selects: Mapping[str, Select], cost: CostStaircase, run: Run
) -> list[tuple[int, dict[str, float]]]:
    """The same requests with only the newest of the earlier answers in the stores."""
    end = known.known.stop
    curve = []
    for size in _history_sizes(end):
        frozen = replace(known, known=range(end - size, end), live=False)
        served = run(frozen, selects, f"{size} earlier answers")
        curve.append((size, {name: r.speedup(cost) for name, r in served.items()}))
    return curve


def _with_tau(thresholds: ThresholdSet, tau: float) -> ThresholdSet:
    first = replace(thresholds.buckets[0], tau=tau)
    return replace(thresholds, buckets=(first, *thresholds.buckets[1:]))


def _history_sizes(most: int) -> list[int]:
    """0, 10, 30, 100, ... and `most` itself."""
    steps = [n * 10**power for power in range(1, 6) for n in (1, 3)]
    return [0, *(n for n in steps if n < 0.8 * most), *([most] if most else [])]


def _shares(batch_shares: Mapping[int, float], sizes: Iterable[int]) -> dict[int, float]:
    """Share of the traffic by largest batch size; all of it in the first where nothing is known."""
    shares = dict.fromkeys(sorted(sizes), 0.0)
    total = sum(batch_shares.values())
    for size, share in (batch_shares if total else {1: 1.0}).items():
        bucket = next((s for s in shares if size <= s), max(shares))
        shares[bucket] += share / (total or 1.0)
    return shares


def _compare(
    served: Mapping[str, Replayed],
    costs: Mapping[int, CostStaircase],
    shares: Mapping[int, float],
    weights: NDArray[np.float64],
) -> Comparison:
    def seconds(name: str) -> NDArray[np.float64]:
        """By request, in the traffic's batch mix."""
        parts = [shares[b] * served[f"{name} {b}"].seconds(cost) for b, cost in costs.items()]
        total: NDArray[np.float64] = weights * np.stack(parts).sum(axis=0)
        return total

    new, previous = seconds("new"), seconds("previous")
    any_way = served[f"new {min(costs)}"]
    plain = weights * sum(shares[b] * any_way.plain_seconds(cost) for b, cost in costs.items())
    draws = np.random.default_rng(0).integers(0, len(new), (RESAMPLES, len(new)))
    gains = previous[draws].sum(1) / new[draws].sum(1) - 1
    low, high = np.quantile(gains, [0.05, 0.95]).tolist()
    return Comparison(
        speedup=float(plain.sum() / new.sum()),
        previous_speedup=float(plain.sum() / previous.sum()),
        gain=float(previous.sum() / new.sum() - 1),
        gain_low=low,
        gain_high=high,
    )


def _by_tenant(
    tenants: Sequence[str],
    weights: NDArray[np.float64],
    replayed: Replayed,
    cost: CostStaircase,
) -> list[tuple[str, int, float, float]]:
    names = np.array(tenants)
    rows = []
    for name in sorted(set(tenants)):
        of_tenant = names == name
        speedup = replayed.speedup(cost, of_tenant.astype(float))
        rows.append((name, int(of_tenant.sum()), float(weights[of_tenant][0]), speedup))
    return sorted(rows, key=lambda row: -row[1])


def _by_depth(nodes: NodeRecords) -> list[Group]:
    depths = range(1, int(nodes.depth.max(initial=0)) + 1)
    return [_group(str(depth), nodes, nodes.depth == depth) for depth in depths]


def _by_source(nodes: NodeRecords) -> list[Group]:
    groups = []
    for bits in np.unique(nodes.sources).tolist():
        name = " + ".join(str(source.name).lower() for source in Source if source & bits)
        groups.append(_group(name or "draft model", nodes, nodes.sources == bits))
    return groups


def _group(name: str, nodes: NodeRecords, members: NDArray[np.bool_]) -> Group:
    kept = members & nodes.kept
    return Group(name, int(members.sum()), int(kept.sum()), int((kept & nodes.taken).sum()))
