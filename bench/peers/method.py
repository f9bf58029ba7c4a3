"""What the benchmarks page says of the machine, the method, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.peers.figures import Book
from bench.peers.systems import SYSTEMS

CAVEATS = """\
- Tokens per second are output tokens over wall time, prefill included; the token that ends an
  answer is not counted. Prefix caches are off everywhere, since prompts come again in other passes.
- Systems take turns, eight prompts at a time (sixteen with eight streams), and each turn begins
  with another system. Before every turn a system's store is put back to what the column says;
  within the turn it goes on learning, so "nothing known" means at most the seven (fifteen) requests
  before.
- The earlier requests' answers come from this engine, once, and every system that keeps earlier
  requests is given the same ones; other libraries would have answered a few of them differently.
  How each takes them is listed below.
- ValuSpec's thresholds are calibrated for each workload on its calibration requests with the same
  earlier requests at hand; where nothing is known before, the shipped set is used. The settings of
  prompt lookup are looked for on calibration requests too. The others run with their published
  defaults. Retrieval runs in the measured process and is waited for.
- transformers pads batches of eight and begins the next when the last answer of one has ended; its
  prompt lookup and llama-cpp-python serve one stream only.
- "Our engine, ..." rows draft as another method does and verify with this engine, so that drafts
  are compared and not engines. Drafts are cut at 15 tokens depth, the limit of exact attention.
- The package `draftretriever` holds another method (an adaptive tree search) than REST; REST's
  rule is therefore written down anew from its description, as is Token Recycling's.
- No smaller model of this family was at hand, so assisted generation is left out.
- Peak memory is that of a process that may hold several modes of a system, and what it reserves
  for keys and values differs: 2 GiB for vLLM, 8 x 4096 tokens here.
"""


def machine(about: dict[str, Any]) -> str:
    environment, settings = about["environment"], about["settings"]
    return (
        f"{environment['processor']}, {about['cores']} cores, {settings['threads']} threads for "
        f"every system. Model {settings['model']} in bf16, greedy, at most "
        f"{settings['max_tokens']} tokens an answer; up to {settings['history']} earlier requests "
        f"and {settings['limit']} measured ones a workload. Revision {about['revision']}."
    )


def gaps(book: Book, failures: dict[str, str]) -> str:
    lines = [f"- {SYSTEMS[name].title} failed: {reason}" for name, reason in failures.items()]
    unmeasured = [s.title for s in SYSTEMS.values() if s not in
                  [*book.systems(), *book.systems(part=True)]]  # fmt: skip
    if unmeasured:
        lines.append(f"- Not measured: {', '.join(unmeasured)}")
    if book.missing():
        lines.append(f"- The run is not complete: {book.missing()} turns are still to come")
    return "\n".join(lines)


def sections(data: dict[str, Any]) -> list[str]:
    """How it was measured: caveats, settings found, versions, commands."""
    return [CAVEATS.strip(), _tuned(data), _versions(data), _commands()]


def _tuned(data: dict[str, Any]) -> str:
    rows = [
        [SYSTEMS[name].title, _options(found["best"]),
         ", ".join(f"{_options(t)}: {t['tok_s']}" for t in found["tried"])]
        for name, found in data["tuned"].items()
    ]  # fmt: skip
    if not rows:
        return ""
    return "Settings found on calibration requests (tokens copied x longest n-gram: tok/s):\n\n" + (
        table(["", "best", "tried"], rows)
    )


def _options(found: dict[str, Any]) -> str:
    return f"{found['lookup']} x {found['ngram']}"


def _versions(data: dict[str, Any]) -> str:
    rows = [
        [name, ", ".join(f"{package} {version}" for package, version in sorted(found.items()))]
        for name, found in sorted(data["versions"].items())
    ]
    stocked = [
        [SYSTEMS[name].title, how]
        for name, how in sorted(data.get("stocked", {}).items())
        if SYSTEMS[name].learns
    ]
    return "\n\n".join([
        "Versions, by environment:", table(["", ""], rows),
        "How earlier requests are taken in:", table(["", ""], stocked),
    ])  # fmt: skip


def _commands() -> str:
    return (
        "```\npython -m bench.peers --data DIR --out results.json          # hours\n"
        "python -m bench.peers --data DIR --out quick.json --quick    # about ten minutes\n"
        "python -m bench.peers.page results.json docs/benchmarks.md README.md\n```"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column left, the others right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
