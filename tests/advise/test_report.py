"""What ``optimize advise`` shows and writes, from findings built by hand."""

from pathlib import Path

import pytest

from optimize.advise.advising import Advised
from optimize.advise.base import Advice, Finding, Measured
from optimize.measure.environment import Environment
from optimize.report import ADVICE, html
from optimize.report.advice import AdviceRecord, tell_advice
from optimize.report.files import save
from tests.profile.nets import LIMITS
from tests.report.conftest import HOSTILE
from tests.report.test_golden import on_console

MACHINE = Environment(cpu="A CPU", cores=2, memory_bytes=None, system="Linux", python="3.11")


@pytest.fixture
def record() -> AdviceRecord:
    merge = Finding("8 groups of branches.", ("a", "b", "c", "d", HOSTILE), 1e-3, "before less after", "Use --fuse.")
    search = Finding("Convolutions.", (), None, "none", "Set the flag.")
    tried = Measured(1.5, 1.4, 1.6, 0.004, 0.0027, "the network in eager")
    advice = (
        Advice("unmerged branches", "exact", merge, tried),
        Advice("cudnn.benchmark", "setting", search, untried="part of the first call"),
    )
    found = Advised(advice, ("G1 equal widths",), LIMITS, 1, 0.004)
    return AdviceRecord(
        created="2026-01-01", command="optimize advise net.pt", source="net.pt", environment=MACHINE, found=found
    )


def test_the_table_and_the_paragraphs(record: AdviceRecord) -> None:
    text = on_console(tell_advice(record), 140)
    row = next(line for line in text.splitlines() if line.startswith("unmerged branches  "))
    assert "1.00 ms (25 %)" in row and "1.50× [1.40, 1.60]" in row and "same answers" in row
    assert "a, b, c, d and 1 more" in text and "4.00 ms before, 2.70 ms after" in text
    assert "part of the first call" in text and "Nothing found by: G1 equal widths." in text


def test_the_page_escapes_and_asks_nothing_of_the_network(record: AdviceRecord) -> None:
    page = html.render(tell_advice(record))
    assert HOSTILE not in page and "http://" not in page and "https://" not in page
    assert page.count('class="panel finding"') == 2 and page.count('class="good"') == 1


def test_what_is_written_reads_back(record: AdviceRecord, tmp_path: Path) -> None:
    assert save(tmp_path / "out", tell_advice(record), record, ADVICE).name == "advice.html"
    assert AdviceRecord.model_validate_json((tmp_path / "out" / "advice.json").read_text()) == record
