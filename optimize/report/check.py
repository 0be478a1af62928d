"""What ``optimize check`` tells: the verdicts in a table, why, how sure, and annotations on the run of a CI."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from optimize.escaping import plain, plain_lines
from optimize.gate import wording
from optimize.gate.record import CaseRecord, Record
from optimize.gate.verdict import Verdict
from optimize.report.document import PAGES, Cell, Document, Grid, GridLine, Item, Items, Span, Text, Tone, only, some

_TONES: dict[Verdict, Tone] = {
    Verdict.PASS: "good",
    Verdict.FAIL: "bad",
    Verdict.INCONCLUSIVE: "warn",
    Verdict.NOT_COMPARABLE: "bad",
    Verdict.WARN: "warn",
}
#: The summary of a step is the document with headings from the second level on.
LEVEL = 2
_ANNOTATIONS = {
    Verdict.FAIL: "error",
    Verdict.NOT_COMPARABLE: "error",
    Verdict.INCONCLUSIVE: "warning",
    Verdict.WARN: "warning",
}


def tell_check(record: Record) -> Document:
    """Return the verdict, a row a case, why each got its verdict, what was measured, and how sure it is."""
    warnings = (Item(case.name, text) for case in record.cases for text in case.warnings)
    timed = record.self_test is not None or any(case.time for case in record.cases)
    how_sure = Text(wording.how_sure(record) if timed else "", "dim")
    sections = some(
        Grid(wording.COLUMNS, tuple(map(_line, record.cases)), left=("Verdict", "Clock")),
        only(how_sure, *PAGES),
        Items(tuple(_item(case, warned=True) for case in record.cases), apart=True, on=("console",)),
        Items(tuple(map(_item, record.cases)), apart=True, fold="what was measured", title="Cases", on=PAGES),
        Items(tuple(warnings), title="Warnings", tone="warn", on=PAGES),
        Items((Item("Environment", lines=tuple(_environment(record))),), fold="where and how", on=PAGES),
        only(how_sure, "console"),
    )
    headline = wording.headline(record)
    return Document(headline, "", sections, heading=f"optimize check: {headline}", tone=_TONES[record.verdict])


def _line(case: CaseRecord) -> GridLine:
    shown = zip(wording.COLUMNS, wording.cells(case), strict=True)
    tones = {"Case": "strong", "Verdict": _TONES[case.verdict]}
    return GridLine(tuple(Cell(text, tone=tones.get(column, "")) for column, text in shown))


def _item(case: CaseRecord, *, warned: bool = False) -> Item:
    details = (Span(line, "dim") for line in wording.details(case))
    warnings = (Span(text, "warn") for text in case.warnings)
    return Item(case.name, wording.explanation(case), lines=(*details, *(warnings if warned else ())))


def _environment(record: Record) -> Iterator[str | tuple[str, Span]]:
    found = record.environment
    facts = {
        "processor": found.get("cpu"),
        "cores": found.get("cores"),
        "system": found.get("system"),
        "load before": ", ".join(f"{load:.1f}" for load in found.get("load_average") or ()),
        "versions": ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items()),
    }
    yield from (f"{name}: {value}" for name, value in facts.items() if value)
    yield "command: ", Span(record.command, "code")


def commands(record: Record) -> Iterator[str]:
    """Yield the commands to a CI runner that mark the run with every case that did not pass."""
    for case in record.cases:
        level = _ANNOTATIONS.get(case.verdict)
        if level is not None:
            title = _data(f"optimize check: {case.name}: {wording.verdict(case.verdict)}")
            title = title.replace(":", "%3A").replace(",", "%2C")
            yield f"::{level} title={title}::{_data(wording.message(case))}"


def _data(text: str) -> str:
    """Return text that a runner does not decode: what it takes for a line end or a percent sign is coded."""
    return plain(text).replace("%", "%25")


#: The element that says what became of a test case; none for one that passed.
_ELEMENTS = {Verdict.FAIL: "failure", Verdict.NOT_COMPARABLE: "error", Verdict.INCONCLUSIVE: "skipped"}


def junit(record: Record) -> str:
    """Return a check as JUnit XML: one test case for each pair, which every CI system shows."""
    verdicts = [case.verdict for case in record.cases]
    suite = ElementTree.Element(
        "testsuite",
        name="optimize check",
        tests=str(len(verdicts)),
        failures=str(verdicts.count(Verdict.FAIL)),
        errors=str(verdicts.count(Verdict.NOT_COMPARABLE)),
        skipped=str(verdicts.count(Verdict.INCONCLUSIVE)),
        time=f"{sum(case.seconds for case in record.cases):.3f}",
        timestamp=record.created,
    )
    for case in record.cases:
        _add(suite, case)
    _make_visible(suite)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _make_visible(suite: ElementTree.Element) -> None:
    """Write out the characters that XML does not allow, wherever they stand."""
    for element in suite.iter():
        element.attrib.update({name: plain(value) for name, value in element.attrib.items()})
        element.text = plain_lines(element.text) if element.text else element.text


def _add(suite: ElementTree.Element, case: CaseRecord) -> None:
    runtime = case.candidate.target if case.candidate else "unopened"
    entry = ElementTree.SubElement(
        suite, "testcase", name=case.name, classname=f"optimize.check.{runtime}", time=f"{case.seconds:.3f}"
    )
    properties = ElementTree.SubElement(entry, "properties")
    for name, value in _properties(case).items():
        ElementTree.SubElement(properties, "property", name=name, value=value)
    element = _ELEMENTS.get(case.verdict)
    if element is not None:
        inconclusive = "inconclusive: " if case.verdict is Verdict.INCONCLUSIVE else ""
        ElementTree.SubElement(entry, element, message=inconclusive + wording.message(case))
    ElementTree.SubElement(entry, "system-out").text = "\n".join([*wording.details(case), *map(plain, case.warnings)])


def _properties(case: CaseRecord) -> dict[str, str]:
    found = {"verdict": case.verdict.value}
    time = case.time
    if time is not None:
        low, high = time.ratio.low, time.ratio.high
        found |= {"ratio": f"{time.ratio.value:.4f}", "clock": time.clock.value, "rounds": str(time.rounds)}
        found |= {"ci95": f"{low:.4f} {high:.4f}"} if low is not None and high is not None else {}
    return found
