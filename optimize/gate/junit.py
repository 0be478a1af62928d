"""A check as JUnit XML: one test case for each pair, which every CI system shows."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from optimize import files
from optimize.escaping import plain, plain_lines
from optimize.gate import wording
from optimize.gate.record import CaseRecord, Record
from optimize.gate.verdict import Verdict

#: The element that says what became of a test case; none for one that passed.
_ELEMENTS = {Verdict.FAIL: "failure", Verdict.NOT_COMPARABLE: "error", Verdict.INCONCLUSIVE: "skipped"}


def text(record: Record) -> str:
    """Return the XML of a check."""
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


def write(record: Record, path: Path) -> None:
    """Write the XML of a check, whole or not at all."""
    files.write_text(path, text(record))


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
