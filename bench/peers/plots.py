"""Two pictures: speed by workload, and what earlier requests bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from bench.peers.figures import Book
from bench.peers.plan import CLOSE_LOOK
from bench.peers.systems import CURVE, OURS, SYSTEMS

matplotlib.use("Agg")
from matplotlib import pyplot

SHOWN = ("transformers-lookup", "llama-lookup", "vllm-ngram", "vllm-suffix", "suffix-tree",
         "rest-tree", "token-recycling", "ours-unfiltered", OURS)  # fmt: skip
"""Systems with a bar; the table has all."""
COLOURS = dict(zip(SHOWN, ("#b3b3b3", "#8c8c8c", "#9ecae1", "#3182bd", "#a1d99b", "#74c476",
                           "#c7a9d9", "#fdae6b", "#d94801"), strict=True))  # fmt: skip


def draw(book: Book, folder: Path) -> None:
    """Write speed.png and learning.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in (("speed", _speed(book)), ("learning", _learning(book))):
        # No date and no version: the same results give the same file.
        figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def _speed(book: Book) -> Any:
    figure, panes = pyplot.subplots(2, 1, figsize=(12, 7.5), layout="constrained")
    for pane, streams in zip(panes, (1, 8), strict=True):
        systems = [s for s in SHOWN if any(book.warm(w, streams, s) for w in book.workloads)]
        width = 0.85 / max(1, len(systems))
        for place, system in enumerate(systems):
            heights = []
            for workload in book.workloads:
                found, best = (
                    book.warm(workload, streams, system),
                    book.best_plain(workload, streams),
                )
                heights.append(found.tok_s / best[1] if found and best else 0.0)
            positions = [i + (place - (len(systems) - 1) / 2) * width for i in range(len(heights))]
            pane.bar(positions, heights, width, label=SYSTEMS[system].title, color=COLOURS[system])
        pane.axhline(1, color="black", linewidth=0.8)
        pane.set_xticks(range(len(book.workloads)), book.workloads)
        pane.set_ylabel("speed over the fastest\nplain decoding of all")
        pane.set_title("One stream" if streams == 1 else "Eight streams", loc="left")
        pane.spines[["top", "right"]].set_visible(False)
    if panes[0].has_data() and book.workloads:
        panes[0].legend(ncols=5, fontsize=8, loc="upper left", frameon=False)
        low, high = panes[0].get_ylim()
        panes[0].set_ylim(low, high * 1.25)  # room for the legend
    return figure


def _learning(book: Book) -> Any:
    workloads = [w for w in book.workloads if w in CLOSE_LOOK] or list(book.workloads[:1])
    figure, panes = pyplot.subplots(
        1, max(1, len(workloads)), figsize=(4 * max(1, len(workloads)), 3.6), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for pane, workload in zip(panes[0], workloads, strict=False):
        for system in CURVE:
            own = book.plain(workload, 1, system)
            points = [
                (n, found.tok_s / own.tok_s)
                for n in book.stores(workload, 1, system)
                if own and (found := book.at(workload, 1, system, n))
            ]
            if points:
                pane.plot(*zip(*points, strict=True), marker="o", color=COLOURS[system],
                          label=SYSTEMS[system].title)  # fmt: skip
        pane.set_title(workload, loc="left")
        pane.set_xlabel("earlier requests known")
        pane.spines[["top", "right"]].set_visible(False)
    panes[0][0].set_ylabel("speed over own plain decoding")
    panes[0][0].set_ylim(bottom=0)
    if panes[0][0].has_data():
        panes[0][0].legend(fontsize=8, frameon=False)
    return figure
