"""Make docs/benchmarks.md and its plots, and the README's table, from results.

    python -m bench.peers.page RESULTS.json docs/benchmarks.md README.md

A file beside the results, RESULTS.notes.md, is taken into the page: what the figures cannot say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.peers import method
from bench.peers.figures import Book
from bench.peers.method import table
from bench.peers.plan import CLOSE_LOOK
from bench.peers.results import Figures
from bench.peers.systems import CURVE, OURS, SYSTEMS, System

NONE = "-"
SUMMARISED = ("transformers-plain", "transformers-lookup", "llama-plain", "vllm-plain",
              "vllm-ngram", "vllm-suffix", "ours-plain", OURS)  # fmt: skip
"""Systems of the README's table."""
BEGIN, END = "<!-- peers: made by bench.peers.page -->", "<!-- /peers -->"
"""Around it."""


def render(data: dict[str, Any], notes: str = "") -> str:
    """The page, as Markdown."""
    heading = [
        "# Benchmarks",
        "Made by `python -m bench.peers.page` from measured results; not edited by hand.",
    ]
    if not data["cells"]:
        nothing = "Nothing has been measured yet. To measure: `make peers DATA=FOLDER`."
        return "\n\n".join([*heading, nothing]) + "\n"
    book = Book(data)
    about, failures = data["about"], data["failures"]
    parts = [
        *heading,
        method.machine(about),
        method.gaps(book, failures),
    ]
    for streams, title in ((1, "One stream"), (8, "Eight streams")):
        parts += [f"## {title}", *_speeds(book, streams)]
    parts += ["![Speed by workload](benchmarks/speed.png)"]
    parts += ["## The same answers?", *_identity(book)]
    parts += ["## Drafts and memory", *_drafts(book)]
    parts += ["## Cold and warm", *_warmth(book), "![Learning curve](benchmarks/learning.png)"]
    parts += ["## Spec-Bench by task", _tasks(book)]
    parts += ["## What our parts bring", _parts(book)]
    parts += ["## Where others are faster", _losses(book), notes.strip()]
    parts += ["## How it was measured", *method.sections(data)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(data: dict[str, Any]) -> str:
    """Tokens per second of the best known systems, at the workloads looked at closely."""
    book = Book(data)
    workloads = [w for w in book.workloads if w in CLOSE_LOOK]
    columns = [(w, n) for w in workloads for n in (1, 8)]

    def row(system: System) -> list[str]:
        found = [book.warm(w, n, system.name) for w, n in columns]
        return [system.title, *(_number(f.tok_s if f else None, ".0f") for f in found)]

    systems = [SYSTEMS[name] for name in SUMMARISED if SYSTEMS[name] in book.systems()]
    return table(["tokens/s", *(f"{w} x{n}" for w, n in columns)], [row(s) for s in systems])


def with_summary(readme: str, data: dict[str, Any]) -> str:
    """The README with its table made anew. Raises ValueError where it has no place for one."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{summary(data)}\n\n{END}{after}"


def _grid(book: Book, systems: Sequence[System], cell: Callable[[str, System], str]) -> str:
    """A row per system, a column per workload."""
    rows = [[s.title, *(cell(w, s) for w in book.workloads)] for s in systems]
    return table(["", *book.workloads], rows)


def _number(value: float | None, form: str = ".2f") -> str:
    return NONE if value is None else format(value, form)


def _speeds(book: Book, streams: int) -> list[str]:
    def tok_s(workload: str, system: System) -> str:
        found = book.warm(workload, streams, system.name)
        best = max(
            f.tok_s for s in book.systems() if (f := book.warm(workload, streams, s.name))
        ) if found else 0.0  # fmt: skip
        text = _number(found.tok_s if found else None, ".1f")
        return f"**{text}**" if found and found.tok_s == best else text

    def gains(workload: str, system: System) -> str:
        found = book.warm(workload, streams, system.name)
        own, best = (
            book.plain(workload, streams, system.name), book.best_plain(workload, streams)
        )  # fmt: skip
        if not found or not own or not best:
            return NONE
        return f"{found.tok_s / own.tok_s:.2f} / {found.tok_s / best[1]:.2f}"

    return [
        "Tokens per second, all earlier requests known to those that keep them:",
        _grid(book, book.systems(), tok_s),
        "Over the system's own plain decoding / over the fastest plain decoding of all:",
        _grid(book, book.systems(), gains),
        "ValuSpec over vLLM's suffix decoding / over the fastest other system:",
        _lead(book, streams),
    ]


def _lead(book: Book, streams: int) -> str:
    found = []
    for workload in book.workloads:
        speeds = {
            s.name: f.tok_s for s in book.systems() if (f := book.warm(workload, streams, s.name))
        }
        ours = speeds.pop(OURS, None)
        others = [speeds.get("vllm-suffix"), max(speeds.values(), default=None)]
        found.append(" / ".join(_number(ours / o if ours and o else None) for o in others))
    return table(["", *book.workloads], [["ValuSpec over", *found]])


def _identity(book: Book) -> list[str]:
    def share(workload: str, system: System) -> str:
        found = [book.identical(workload, streams, system.name) for streams in (1, 8)]
        return " / ".join(_number(value and 100 * value, ".0f") for value in found)

    return [
        "Share of answers, in per cent, that are token for token the system's own plain answers of "
        "one stream: with one stream / with eight.",
        _grid(book, book.systems(), share),
    ]


def _drafts(book: Book) -> list[str]:
    def drafts(workload: str, system: System) -> str:
        found = book.warm(workload, 1, system.name)
        if not found or not found.drafted:
            return NONE
        return f"{found.acceptance_length:.2f} / {_number(found.drafted_per_accepted, '.1f')}"

    def peak(system: System) -> str:
        found = [
            f.peak_mb
            for streams in (1, 8)
            for w in book.workloads
            if (f := book.warm(w, streams, system.name))
        ]
        return f"{max(found)}" if found else NONE

    drafting = [s for s in book.systems() if s.plain != s.name]
    return [
        "Tokens per step (acceptance length) / draft tokens verified per accepted one; one stream:",
        _grid(book, drafting, drafts),
        "Peak memory of the process, MB:",
        table(["", "MB"], [[s.title, peak(s)] for s in book.systems()]),
    ]


def _warmth(book: Book) -> list[str]:
    def speedup(found: Figures | None, own: Figures | None) -> str:
        return _number(found.tok_s / own.tok_s if found and own else None)

    def cold_and_warm(workload: str, system: System) -> str:
        own = book.plain(workload, 1, system.name)
        ends = book.at(workload, 1, system.name, 0), book.warm(workload, 1, system.name)
        return " → ".join(speedup(found, own) for found in ends)

    rows = []
    for workload in (w for w in book.workloads if w in CLOSE_LOOK):
        for name in CURVE:
            own = book.plain(workload, 1, name)
            points = [
                f"{n}: {speedup(book.at(workload, 1, name, n), own)}"
                for n in book.stores(workload, 1, name)
            ]
            if points:
                rows.append([workload, SYSTEMS[name].title, ", ".join(points)])
    learners = [s for s in book.systems() if s.learns]
    return [
        "Speed over the system's own plain decoding, one stream: nothing known before → all "
        "earlier requests known.",
        _grid(book, learners, cold_and_warm),
        "By number of earlier requests:",
        table(["", "", "earlier requests: speed over own plain"], rows),
    ]


def _tasks(book: Book) -> str:
    by_system = {s.title: book.by_task(s.name) for s in book.systems()}
    tasks = sorted({task for found in by_system.values() for task in found})
    if not tasks:
        return "Not measured."
    rows = [
        [title, *(_number(f.get(t), ".1f") for t in tasks)] for title, f in by_system.items() if f
    ]
    return "Tokens per second, one stream:\n\n" + table(["", *tasks], rows)


def _parts(book: Book) -> str:
    systems = [SYSTEMS[name] for name in (OURS, "ours-unfiltered")] + book.systems(part=True)
    columns = [(w, n) for w in book.workloads if w in CLOSE_LOOK for n in (1, 8)]
    rows = []
    for system in systems:
        found = [(book.warm(w, n, system.name), book.warm(w, n, OURS)) for w, n in columns]
        rows.append([
            system.title,
            *(_number(f.tok_s / o.tok_s if f and o else None) for f, o in found),
        ])  # fmt: skip
    header = ["speed over the whole", *(f"{w} x{n}" for w, n in columns)]
    return table(header, rows) if columns else "Not measured."


def _losses(book: Book) -> str:
    if not any(book.warm(w, n, OURS) for w in book.workloads for n in (1, 8)):
        return "Not measured."
    lines = [
        f"- {workload}, {streams} stream{'s' * (streams > 1)}: {SYSTEMS[name].title}, "
        f"{ratio:.2f} times as fast as ValuSpec"
        for workload, streams, name, ratio in book.losses()
    ]
    return "\n".join(lines) or "Nowhere in these results."


def main(argv: Sequence[str] | None = None) -> int:
    from bench.peers.plots import draw

    results, page, *readmes = map(Path, argv or sys.argv[1:])
    data = json.loads(results.read_text())
    notes = results.with_suffix(".notes.md")
    page.write_text(render(data, notes.read_text() if notes.is_file() else ""))
    for readme in readmes:
        readme.write_text(with_summary(readme.read_text(), data))
    if data["cells"]:
        draw(Book(data), page.with_suffix(""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
