"""A check on GitHub: the summary of the step in Markdown, and annotations on the run."""

from __future__ import annotations

import html
from pathlib import Path

from optimize.escaping import plain
from optimize.gate import wording
from optimize.gate.record import CaseRecord, Record
from optimize.gate.verdict import Outcome
from optimize.report.markdown import code, escape

#: Where GitHub wants the summary of a step.
VARIABLE = "GITHUB_STEP_SUMMARY"
_ANNOTATIONS = {
    Outcome.FAIL: "error",
    Outcome.NOT_COMPARABLE: "error",
    Outcome.INCONCLUSIVE: "warning",
    Outcome.WARN: "warning",
}


def markdown(record: Record) -> str:
    """Return the summary of a check."""
    parts = [f"## optimize check: {wording.headline(record)}"]
    if record.cases:
        parts.append(_table(record))
    parts.append("\n".join(f"- **{escape(case.name)}**: {escape(wording.explanation(case))}" for case in record.cases))
    parts.append(wording.how_sure(record))
    warnings = [f"- {escape(case.name)}: {escape(text)}" for case in record.cases for text in case.warnings]
    if warnings:
        parts.append("\n".join(["**Warnings**", "", *warnings]))
    parts += [_details(case) for case in record.cases]
    parts.append(_environment(record))
    return "\n\n".join(parts) + "\n"


def append(record: Record, path: Path) -> None:
    """Add the summary to a file that other steps may have written to."""
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown(record))


def commands(record: Record) -> list[str]:
    """Return the commands that mark the run with every case that did not pass."""
    found = []
    for case in record.cases:
        level = _ANNOTATIONS.get(case.verdict)
        if level is not None:
            title = _property(f"optimize check: {case.name}: {wording.verdict(case.verdict)}")
            found.append(f"::{level} title={title}::{_data(wording.message(case))}")
    return found


def _table(record: Record) -> str:
    alignments = ["---:" if column in wording.RIGHT else "---" for column in wording.COLUMNS]
    rows = [wording.COLUMNS, alignments, *(map(escape, wording.cells(case)) for case in record.cases)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _details(case: CaseRecord) -> str:
    lines = "\n".join(f"- {escape(line)}" for line in wording.details(case)) or "- nothing was measured"
    return f"<details><summary>{html.escape(plain(case.name))}: what was measured</summary>\n\n{lines}\n\n</details>"


def _environment(record: Record) -> str:
    found = record.environment
    facts = {
        "processor": found.get("cpu"),
        "cores": found.get("cores"),
        "system": found.get("system"),
        "load before": ", ".join(f"{load:.1f}" for load in found.get("load_average") or ()),
        "versions": ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items()),
    }
    lines = "\n".join(f"- {name}: {escape(str(value))}" for name, value in facts.items() if value)
    lines += f"\n- command: {code(record.command)}"
    return f"<details><summary>Environment</summary>\n\n{lines}\n\n</details>"


def _data(text: str) -> str:
    """Return text that a runner does not decode: what it takes for a line end or a percent sign is coded."""
    return plain(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
