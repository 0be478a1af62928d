"""The three files, written and read back."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from optimize.errors import UsageError
from optimize.report import FILES
from optimize.report.files import check_ending, read, save
from optimize.report.model import Report
from optimize.report.run import tell_run


def test_written_files_are_read_back(report: Report, tmp_path: Path) -> None:
    page = save(tmp_path / "out", tell_run(report), report, FILES)
    assert page == tmp_path / "out" / "report.html"
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert read(tmp_path / "out") == report == read(tmp_path / "out" / "report.json")


def test_missing_or_foreign_file_is_a_usage_error(report: Report, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"report\.json' cannot be read: No such file"):
        read(tmp_path)
    file = tmp_path / "report.json"
    file.write_text(report.model_dump_json().replace('"schema_version":1', '"schema_version":2'))
    with pytest.raises(UsageError, match="not a report of this version: schema_version"):
        read(file)
    file.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read(file)


@pytest.mark.parametrize(
    ("endings", "words"),
    [
        ((".svg", ".html"), r"neither an \.svg nor an \.html file"),
        ((".json", ".md"), r"neither a \.json nor an \.md file"),
        ((".html", ".svg", ".json"), r"no \.html, \.svg or \.json file"),
    ],
)
def test_another_ending_is_a_usage_error(endings: tuple[str, ...], words: str) -> None:
    check_ending(Path(f"graph{endings[0].upper()}"), *endings, example="")
    with pytest.raises(UsageError, match=words):
        check_ending(Path("graph.pdf"), *endings, example="")


def test_the_first_mistake_of_many_is_enough(report: Report, tmp_path: Path) -> None:
    """Each takes hundreds of bytes: a file of 50 MB took 8 GB."""
    for name, wrong in (("rows", [{}] * 1000), ("warnings", [0] * 1000)):
        with pytest.raises(ValidationError) as caught:
            Report.model_validate({**report.model_dump(), name: wrong})
        assert caught.value.error_count() < 20
