"""Pytest plugin of `make faults`: one line per fault case, and the table of docs/reliability.md.

    python -m pytest -p tests.support.fault_report -m fault --fault-table docs/reliability.md

A test names the cases it covers by `@pytest.mark.fault(17, 18)`. Which of the common oracles it
asked, and figures worth keeping, it leaves as user properties ("oracle", "figure").
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.fault_cases import CASES, ORACLES, Case

BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"


@dataclass
class Outcome:
    """What the tests of one case found."""

    num_passed: int = 0
    failed: list[str] = field(default_factory=list)
    oracles: set[str] = field(default_factory=set)
    figures: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        return "holds" if self.num_passed else "not run"


_outcomes: defaultdict[int, Outcome] = defaultdict(Outcome)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", type=Path, help="rewrite the table of cases in this file")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("fault"):
            item.user_properties.extend(("fault", number) for number in marker.args)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and not report.failed:
        return
    properties = report.user_properties
    for number in {value for name, value in properties if name == "fault"}:
        outcome = _outcomes[int(str(number))]
        if report.failed:
            outcome.failed.append(report.nodeid)
        else:
            outcome.num_passed += 1
        outcome.oracles |= {str(value) for name, value in properties if name == "oracle"}
        outcome.figures += [str(value) for name, value in properties if name == "figure"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("fault cases")
    for number, case in CASES.items():
        outcome = _outcomes[number]
        asked = " ".join(name if name in outcome.oracles else "." * len(name) for name in ORACLES)
        line = f"{number:>3}  {outcome.verdict:<8} {asked}  {case.injected}"
        terminalreporter.write_line(line, red=bool(outcome.failed))
        for nodeid in outcome.failed:
            terminalreporter.write_line(f"     {nodeid}", red=True)
    path: Path | None = terminalreporter.config.getoption("--fault-table")
    if path is not None:
        before, _, rest = path.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        path.write_text(f"{before}{BEGIN}\n{_table()}\n{END}{after}")


def _table() -> str:
    rows = ["| # | injected | what has to happen | result | oracles | tests | measured |"]
    rows.append("|---|---|---|---|---|---|---|")
    rows += [_row(number, case, _outcomes[number]) for number, case in CASES.items()]
    return "\n".join(rows)


def _row(number: int, case: Case, outcome: Outcome) -> str:
    asked = " ".join(name for name in ORACLES if name in outcome.oracles)
    measured = "; ".join(dict.fromkeys(outcome.figures))
    num_tests = outcome.num_passed + len(outcome.failed)
    note = f"{case.expected}{f' *{case.note}*' if case.note else ''}"
    cells = (number, case.injected, note, outcome.verdict, asked, num_tests, measured)
    return f"| {' | '.join(map(str, cells))} |"
