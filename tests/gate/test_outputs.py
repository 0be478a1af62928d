"""JUnit XML, the step summary and the console, letter by letter.

Written anew by ``python -m tests.gate.test_outputs`` after a change that was meant.
"""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from optimize.gate import record, wording
from optimize.gate.record import FindingRecord, Record
from optimize.gate.verdict import Ratio, Verdict
from optimize.report import check, markdown
from tests.gate.records import CASES, RECORD
from tests.report.test_golden import on_console

GOLDEN = Path(__file__).parents[1] / "golden"


TEXTS = {
    "check.xml": lambda: check.junit(RECORD),
    "check.md": lambda: markdown.render(check.tell_check(RECORD), level=check.LEVEL),
    "check_annotations.txt": lambda: "\n".join(check.commands(RECORD)) + "\n",
    "check_console_132.txt": lambda: on_console(check.tell_check(RECORD), 132),
}


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name: str) -> None:
    assert TEXTS[name]() == (GOLDEN / name).read_text(encoding="utf-8")


def test_junit_says_what_ci_systems_read() -> None:
    root = ElementTree.fromstring(check.junit(RECORD))
    assert root.attrib | {"tests": "4", "failures": "1", "errors": "1", "skipped": "1"} == root.attrib
    cases = root.findall("testcase")
    assert [[child.tag for child in case if child.tag != "system-out"] for case in cases] == [
        ["properties"],
        ["properties", "failure"],
        ["properties", "skipped"],
        ["properties", "error"],
    ]
    failure = cases[1].find("failure")
    assert failure is not None and failure.get("message", "").startswith("+6.8 % [5.8, 7.8] vs limit 5 %")


def test_percentiles_are_missing_with_their_reason() -> None:
    lines = wording.details(CASES[1])
    assert any("84 runs, p90 2.40 ms, p95 n/a (needs 130 runs)" in line for line in lines)
    assert any("40 runs, p90 n/a (needs 64 runs)" in line for line in lines)


def test_annotations_escape_what_github_would_read_as_commands() -> None:
    case = CASES[3].model_copy(update={"name": "a,b:c", "reason": "100 %"})
    (line,) = check.commands(RECORD.model_copy(update={"cases": (case,)}))
    assert line == "::error title=optimize check%3A a%2Cb%3Ac%3A NOT COMPARABLE::100 %25"


def test_error_rates_are_told_of_what_was_timed() -> None:
    """Of a path that was mistyped there is nothing to be sure of."""
    record = RECORD.model_copy(update={"self_test": None})
    lost = record.model_copy(update={"cases": CASES[3:]})
    told = [on_console(check.tell_check(entry), 132) for entry in (record, lost)]
    assert ["Error rates" in text for text in told] == [True, False]


def test_a_verdict_says_what_it_is_of_where_that_is_not_time_alone() -> None:
    lost = FindingRecord(metric="accuracy", verdict=Verdict.INCONCLUSIVE, limit="", found="", reason="")
    both = CASES[2].model_copy(update={"findings": (*CASES[2].findings, lost)})
    said = [wording.cells(case)[wording.COLUMNS.index("Verdict")] for case in (*CASES, both)]
    assert said == ["PASS", "FAIL", "INCONCLUSIVE", "NOT COMPARABLE", "INCONCLUSIVE: time, accuracy"]


def test_a_minus_is_a_minus() -> None:
    assert wording.percent(Ratio(value=0.836, low=0.83, high=0.84)) == "−16.4 % [−17.0, −16.0]"


def test_record_reads_back() -> None:
    assert Record.model_validate_json(RECORD.model_dump_json(indent=1)).cases == CASES


def test_an_unfit_runner_is_called_so() -> None:
    assert RECORD.self_test is not None
    found = RECORD.self_test.model_copy(update={"fit": False, "smallest_regression": None})
    text = wording.self_test(found)
    assert "NOT fit" in text and "no slowdown up to 50 %" in text


def test_exit_codes() -> None:
    codes = {outcome: record.exit_code(outcome, "keep") for outcome in Verdict}
    assert [codes[entry] for entry in ("pass", "fail", "inconclusive", "not comparable", "warn")] == [0, 1, 3, 4, 0]  # type: ignore[index]
    assert record.overall([Verdict.NOT_COMPARABLE, Verdict.FAIL]) is Verdict.FAIL
    assert record.overall([Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE]) is Verdict.NOT_COMPARABLE


if __name__ == "__main__":
    for file, text in TEXTS.items():
        (GOLDEN / file).write_text(text(), encoding="utf-8")
