"""The figures of a report, each an SVG text to be put into a page."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobs.findings import Bucket, Evaluation, Group

INK, FAINT, GRID = "#1f2733", "#8a94a3", "#e6e9ee"
COLOURS = {
    "filtered": "#2563eb",
    "oracle": "#b6c2d6",
    "chain": "#0f9d76",
    "frequency": "#e08a1e",
    "unfiltered": "#d2504a",
    "plain": FAINT,
}
NAMES = {
    "filtered": "filtered (ValuSpec)",
    "oracle": "oracle filter",
    "chain": "longest match",
    "frequency": "most frequent",
    "unfiltered": "unfiltered tree",
    "plain": "plain decoding",
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "valuspec",  # equal reports give equal files
}


def speedups(evaluation: Evaluation) -> str:
    """Ways of choosing nodes, with and without retrieval."""

    def draw(axes: Axes) -> None:
        order = sorted(evaluation.modes, key=lambda m: m.speedup)
        alone = {m.name: m.speedup for m in evaluation.without_retrieval}
        for y, mode in enumerate(order):
            colour = COLOURS[mode.name]
            axes.barh(y, mode.speedup, height=0.62, color=colour)
            axes.plot([alone[mode.name]] * 2, [y - 0.38, y + 0.38], color=INK, linewidth=2)
            right = max(mode.speedup, alone[mode.name])
            axes.text(right + 0.05, y, f"{mode.speedup:.2f}x", va="center", weight="bold")
        axes.set_yticks(range(len(order)), [NAMES[m.name] for m in order])
        axes.plot([], [], color=INK, linewidth=2, label="without retrieval")
        _plain_line(axes.axvline)
        axes.set_xlim(0, 1.15 * max(m.speedup for m in order))
        axes.set_xlabel("speedup over plain decoding")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower right")

    return _svg(draw)


def history_curve(evaluation: Evaluation) -> str:
    """Cold to warm: the same requests after ever more earlier answers."""

    def draw(axes: Axes) -> None:
        sizes = [size for size, _ in evaluation.history_curve]
        for name in ("filtered", "chain", "frequency"):
            values = [speedup[name] for _, speedup in evaluation.history_curve]
            axes.plot(sizes, values, "o-", color=COLOURS[name], label=NAMES[name], markersize=4)
        axes.set_xscale("symlog", linthresh=10)
        # The last size is the whole history, whatever it is: a close neighbour goes unlabelled.
        labels = [str(s) if s == sizes[-1] or s < 0.6 * sizes[-1] else "" for s in sizes]
        axes.set_xticks(sizes, labels)
        axes.minorticks_off()
        _plain_line(axes.axhline)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("earlier answers in the stores")
        axes.set_ylabel("speedup")
        axes.legend(loc="lower right")

    return _svg(draw)


def old_and_new(evaluation: Evaluation) -> str:
    """The new thresholds beside the old ones, by batch size."""

    def draw(axes: Axes) -> None:
        labels = [f"{name}\n{b.share:.0%}" for name, b in _bucket_names(evaluation)]
        compared = evaluation.comparison
        old = [*(b.previous_speedup for b in evaluation.buckets), compared.previous_speedup]
        new = [*(b.speedup for b in evaluation.buckets), compared.speedup]
        x = np.arange(len(old))
        for shift, values, colour, name in (
            (-0.2, old, COLOURS["oracle"], "old thresholds"),
            (0.2, new, COLOURS["filtered"], "new thresholds"),
        ):
            axes.bar(x + shift, values, width=0.38, color=colour, label=name)
            for place, value in zip(x + shift, values, strict=True):
                axes.text(place, value + 0.03, f"{value:.2f}", ha="center", fontsize=8)
        axes.set_xticks(x, [*labels, "this\ntraffic"])
        axes.set_xlabel("batch size, and its share of the decode steps")
        _plain_line(axes.axhline)
        axes.set_ylim(0, 1.25 * max(*old, *new))
        axes.set_ylabel("speedup")
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper right", ncols=2)

    return _svg(draw)


def tau_curve(evaluation: Evaluation) -> str:
    """Tokens per second against the threshold, for a batch of one."""

    def draw(axes: Axes) -> None:
        first = evaluation.buckets[0]
        taus, values = zip(*evaluation.tau_curve, strict=True)
        speeds = first.plain_tok_s * np.array(values)
        axes.plot(taus, speeds, "o-", color=COLOURS["filtered"], markersize=4)
        chosen = first.plain_tok_s * first.speedup
        axes.plot([first.tau], [chosen], "o", markersize=11, markerfacecolor="none", color=INK)
        axes.annotate(
            f"chosen: {first.tau:g}",
            (first.tau, chosen),
            xytext=(0, -18),
            textcoords="offset points",
            ha="right",
        )
        axes.set_xscale("symlog", linthresh=0.01)
        axes.set_xticks([0, 0.01, 0.05, 0.2, 1], ["0", "0.01", "0.05", "0.2", "1"])
        axes.minorticks_off()
        axes.axhline(first.plain_tok_s, color=FAINT, linestyle="--", linewidth=1)
        axes.text(0, first.plain_tok_s, " plain decoding", va="bottom", color=FAINT)
        axes.set_ylim(0, 1.12 * speeds.max())
        axes.set_xlabel("threshold tau: least value of a node worth verifying")
        axes.set_ylabel("tokens per second")

    return _svg(draw)


def reliability(evaluation: Evaluation) -> str:
    """Estimated probability of acceptance against what happened; counts below."""
    quality = evaluation.reliability
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, height_ratios=(4, 1), sharex=True)
        sizes = np.array(quality.bin_sizes)
        filled = sizes > 0
        value = np.array(quality.mean_value)[filled]
        share = np.array(quality.share_accepted)[filled]
        upper.plot([0, 1], [0, 1], color=FAINT, linestyle="--", linewidth=1)
        upper.errorbar(
            value,
            share,
            yerr=1.96 * np.sqrt(share * (1 - share) / sizes[filled]),
            fmt="o-",
            color=COLOURS["filtered"],
            markersize=5,
            capsize=2,
        )
        upper.text(
            0.03,
            0.95,
            f"ECE {quality.expected_calibration_error:.3f}   Brier {quality.brier:.3f}   "
            f"AUC {quality.auc:.3f}",
            transform=upper.transAxes,
            va="top",
        )
        upper.set_ylabel("share accepted")
        upper.set_ylim(0, 1.02)
        edges = np.linspace(0, 1, len(sizes) + 1)
        lower.bar(edges[:-1], sizes, width=np.diff(edges) * 0.92, align="edge", color=GRID)
        lower.set_yscale("log")
        lower.set_ylabel("nodes")
        lower.set_xlabel("value: estimated probability that the target goes this way")
        return _text(figure)


def by_depth(evaluation: Evaluation) -> str:
    """Kept nodes by depth, and how many of them were accepted."""

    def draw(axes: Axes) -> None:
        shown = [g for g in evaluation.by_depth if g.kept]
        x = np.arange(len(shown))
        axes.bar(x, [g.kept for g in shown], color=COLOURS["oracle"], label="verified")
        axes.bar(x, [g.accepted for g in shown], color=COLOURS["filtered"], label="accepted")
        for i, group in enumerate(shown):
            axes.text(i, group.kept, _rate(group), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(x, [g.name for g in shown])
        axes.set_xlabel("depth in the tree")
        axes.set_ylabel("nodes")
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper right")

    return _svg(draw)


def by_source(evaluation: Evaluation) -> str:
    """Kept nodes by where their tokens had been seen, and how many of them were accepted."""

    def draw(axes: Axes) -> None:
        shown = sorted((g for g in evaluation.by_source if g.kept), key=lambda g: g.kept)
        y = np.arange(len(shown))
        axes.barh(y, [g.kept for g in shown], color=COLOURS["oracle"], label="verified")
        axes.barh(y, [g.accepted for g in shown], color=COLOURS["filtered"], label="accepted")
        for i, group in enumerate(shown):
            axes.text(group.kept, i, f" {_rate(group)}", va="center", fontsize=8)
        axes.set_yticks(y, [g.name for g in shown])
        axes.set_xlim(0, 1.12 * max((g.kept for g in shown), default=1))
        axes.set_xlabel("nodes")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower right")

    return _svg(draw)


def costs(evaluation: Evaluation) -> str:
    """The verify-cost staircases."""

    def draw(axes: Axes) -> None:
        shades = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.8, len(evaluation.buckets)))
        for (name, bucket), shade in zip(_bucket_names(evaluation), shades, strict=True):
            milliseconds = 1e3 * np.array(bucket.cost.seconds)
            axes.plot(bucket.cost.rows, milliseconds, "o-", color=shade, label=name, markersize=4)
        axes.set_xlabel("rows per request in one forward (1 is plain decoding)")
        axes.set_ylabel("milliseconds")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right")

    return _svg(draw)


def tenants(evaluation: Evaluation) -> str:
    """Speedup of each tenant, the busiest at the top."""

    def draw(axes: Axes) -> None:
        shown = evaluation.tenants[:12][::-1]
        for y, (_, answers, _, speedup) in enumerate(shown):
            axes.barh(y, speedup, height=0.62, color=COLOURS["filtered"])
            axes.text(speedup + 0.04, y, f"{speedup:.2f}x  ({answers} answers)", va="center")
        axes.set_yticks(range(len(shown)), [name[:24] for name, *_ in shown])
        _plain_line(axes.axvline)
        axes.set_xlim(0, 1.45 * max(t[3] for t in shown))
        axes.set_xlabel("speedup over plain decoding")
        axes.grid(axis="y", visible=False)

    return _svg(draw)


def _bucket_names(evaluation: Evaluation) -> list[tuple[str, Bucket]]:
    names, low = [], 1
    for bucket in evaluation.buckets:
        high = bucket.max_batch_size
        names.append((f"batch {low}" if low == high else f"batch {low}-{high}", bucket))
        low = high + 1
    return names


def _rate(group: Group) -> str:
    return f"{group.accepted / group.kept:.0%}"


def _plain_line(line: Callable[..., object]) -> None:
    line(1, color=FAINT, linestyle="--", linewidth=1, zorder=3)


def _svg(draw: Callable[[Axes], None]) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        draw(figure.subplots())
        return _text(figure)


def _text(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue().decode()
    return text[text.index("<svg") :]
