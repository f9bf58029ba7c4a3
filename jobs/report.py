"""`report.json` for machines and `report.html`, one self-contained page, for people."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from jobs import figures
from jobs.findings import Evaluation


@dataclass(frozen=True, slots=True)
class Report:
    """What a run found and what it did about it."""

    title: str
    outcome: str
    """One word or two, for machines."""
    verdict: str
    """One or two sentences, for people."""
    facts: Mapping[str, Any]
    """What it was made from, in the order to be shown."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """What was left out of the input, by reason."""
    evaluation: Evaluation | None = None
    """None where there was too little to evaluate."""

    def write(self, folder: Path) -> None:
        """Write both files; each appears whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "report.json", self.to_json())
        write_whole(folder / "report.html", self.to_html())

    def to_json(self) -> str:
        return json.dumps(_plain(self), indent=1, allow_nan=False) + "\n"

    def to_html(self) -> str:
        body = [f"<h1>{_text(self.title)}</h1>", f"<p class=verdict>{_text(self.verdict)}</p>"]
        if self.evaluation:
            body += [_tiles(self.evaluation), *_sections(self.evaluation)]
        body += ["<h2>Made from</h2>", _table((), [*self.facts.items()])]
        if self.skipped:
            body += ["<h2>Left out</h2>", _table(("reason", "count"), [*self.skipped.items()])]
        return (
            f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{_text(self.title)}</title>"
            "<meta name=viewport content='width=device-width'>"
            f"<style>{STYLE}</style>\n<main>{''.join(body)}</main></html>\n"
        )


def write_whole(path: Path, text: str) -> None:
    """Write a file that readers see complete or not at all, even if this process is killed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _tiles(evaluation: Evaluation) -> str:
    filtered, oracle = evaluation.speedup("filtered"), evaluation.speedup("oracle")
    mode = next(m for m in evaluation.modes if m.name == "filtered")
    tiles = [
        (f"{filtered:.2f}x", "the speed of plain decoding"),
        (f"{filtered / evaluation.speedup('unfiltered'):.2f}x", "the speed of the unfiltered tree"),
        (f"{filtered / oracle:.0%}", "of the best any filter could do"),
        (f"{mode.mean_acceptance_length:.2f}", "tokens a step"),
        (f"{mode.nodes_per_step:.1f}", f"nodes verified, of {mode.offered_per_step:.0f} offered"),
        (f"{evaluation.reliability.expected_calibration_error:.3f}", "calibration error (ECE)"),
    ]
    cells = "".join(f"<div><b>{_text(n)}</b><span>{_text(t)}</span></div>" for n, t in tiles)
    return f"<div class=tiles>{cells}</div>"


def _sections(evaluation: Evaluation) -> list[str]:
    compared = evaluation.comparison
    shown = [
        (
            "Ways to choose nodes",
            "Decoding speed on held-out answers. The oracle keeps exactly what the target accepts; "
            "no filter of the same candidates can do better.",
            figures.speedups(evaluation),
        ),
        (
            "Cold to warm",
            "The same held-out requests, after ever more earlier answers.",
            figures.history_curve(evaluation),
        ),
        (
            "Old and new",
            f"On this traffic the new thresholds give {compared.gain:+.1%} tokens per second "
            f"({compared.gain_low:+.1%} to {compared.gain_high:+.1%} with 90 % confidence).",
            figures.old_and_new(evaluation),
        ),
        (
            "The threshold",
            "Too low verifies what is not accepted, too high gives up what would be. The price of "
            "a node is taken into account besides, so low thresholds do little harm.",
            figures.tau_curve(evaluation),
        ),
        (
            "Are the values true?",
            "Of nodes valued at 30 %, 30 % should be accepted.",
            figures.reliability(evaluation),
        ),
        (
            "Acceptance by depth",
            "Nodes verified, and how many of them the target accepted.",
            figures.by_depth(evaluation),
        ),
        (
            "Acceptance by source",
            "Where the tokens had been seen: the request's own text, the trees retrieved for it, "
            "the store all requests share.",
            figures.by_source(evaluation),
        ),
        (
            "What a forward costs",
            "The flatter these lines, the more a tree may hold.",
            figures.costs(evaluation),
        ),
    ]
    if len(evaluation.tenants) > 1:
        hint = "Tenants share no drafts; the busiest are shown."
        shown.append(("By tenant", hint, figures.tenants(evaluation)))
    cards = "".join(
        f"<figure><h3>{_text(title)}</h3><p>{_text(hint)}</p>{svg}</figure>"
        for title, hint, svg in shown
    )
    return [
        f"<div class=figures>{cards}</div>",
        "<h2>In numbers</h2>",
        _table(
            ("batch of one", "speedup", "without retrieval", "tokens a step", "nodes a step"),
            [
                (figures.NAMES[m.name], f"{m.speedup:.3f}", f"{alone.speedup:.3f}",
                 f"{m.mean_acceptance_length:.2f}", f"{m.nodes_per_step:.1f}")
                for m, alone in zip(evaluation.modes, evaluation.without_retrieval, strict=True)
            ],
        ),
        _table(
            ("largest batch", "share of steps", "tau", "plain, tok/s a stream", "speedup, old",
             "new"),
            [
                (b.max_batch_size, f"{b.share:.0%}", f"{b.tau:g}", f"{b.plain_tok_s:.1f}",
                 f"{b.previous_speedup:.3f}", f"{b.speedup:.3f}")
                for b in evaluation.buckets
            ],
        ),
    ]  # fmt: skip


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    head = head and f"<tr>{head}</tr>"
    lines = "".join(
        "<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table>{head}{lines}</table></div>"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _plain(value: Any) -> Any:
    """Values JSON can hold: NaN, an AUC of nothing for one, becomes null."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


STYLE = """
body{margin:0;background:#f4f6f9;color:#1f2733;font:15px/1.5 system-ui,sans-serif}
main{max-width:1160px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 10px}h3{font-size:16px;margin:0}
.verdict{font-size:18px;margin:0 0 24px;max-width:62em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px}
.tiles div{background:#fff;border-radius:10px;padding:14px 16px}
.tiles b{display:block;font-size:26px;line-height:1.2;color:#2563eb}
.tiles span{color:#5b6675;font-size:13px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:16px;
margin-top:16px}
figure{margin:0;background:#fff;border-radius:10px;padding:18px 20px}
figure p{margin:2px 0 8px;color:#5b6675;font-size:13.5px;min-height:40px}
svg{width:100%;height:auto}
table{border-collapse:collapse;background:#fff;border-radius:10px;margin:0 0 16px;font-size:14px}
th,td{padding:6px 14px;text-align:left;border-bottom:1px solid #eef1f5;
font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
th{color:#5b6675;font-weight:500}
"""
