"""The site builds without a warning, asks nothing of other machines, and its reference has what the program has."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import click
import pytest

from optimize import registry
from optimize.cli import COMMANDS
from optimize.recipe import Recipe
from optimize.report.model import Report, Row
from tests.docs.execution import PAGES, ROOT, written_pages

#: What a browser fetches by itself, as it stands in HTML and CSS.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=\"([^\"]+)\""
    r"|<link\b(?![^>]*\brel=\"(?:canonical|index|search|next|prev)\")[^>]*\bhref=\"([^\"]+)\""
    r"|@import\s+[\"']([^\"']+)|url\(\s*[\"']?([^)\"']+)"
)
#: The extensions without the one that executes notebooks.
UNEXECUTED = "extensions=myst_nb,sphinx.ext.autodoc,sphinx.ext.napoleon,generated"
NOTEBOOKS = sorted((PAGES / "notebooks").glob("*.ipynb"))
Notebook = dict[str, Any]


def build(out: Path, *options: str) -> Path:
    """Returns the folder of the built site; beside it the build leaves the notebooks as they were executed."""
    words = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(out / "doctrees"), *options]
    words += [str(PAGES), str(out / "html")]
    before = sorted(PAGES.rglob("*"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(out / "home")}
    (out / "home").mkdir()
    built = subprocess.run([sys.executable, "-m", "sphinx", *words], env=environment, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, ""), built.stderr
    assert sorted(PAGES.rglob("*")) == before, "the build left files among the pages"
    return out / "html"


def shown(site: Path, page: str) -> str:
    """Returns the text of a page without its tags."""
    return unescape(re.sub(r"<[^>]+>", "", (site / page).read_text(encoding="utf-8")))


def test_the_site(tmp_path: Path) -> None:
    """Builds it once: several tests would do so once in each process that shares them. No notebook is executed."""
    site = build(tmp_path, "-D", UNEXECUTED)
    every_page_is_there(site)
    nothing_is_fetched_from_elsewhere(site)
    the_reference_has_every_option(site)
    the_reference_has_every_pass_and_target(site)
    the_reference_has_every_key(site)


@pytest.mark.slow
def test_the_notebooks_of_the_site(tmp_path: Path) -> None:
    """Builds it as it is published. The pages that do the same as the notebooks are executed with every change."""
    site = build(tmp_path)
    nothing_is_fetched_from_elsewhere(site)
    the_notebooks_ran(site)
    the_cnn_is_as_good_as_its_notebook_says(site)
    the_lstm_takes_every_length(site)


def every_page_is_there(site: Path) -> None:
    for page in [*written_pages(), *NOTEBOOKS]:
        assert (site / page.relative_to(PAGES)).with_suffix(".html").is_file()


def nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for file in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for found in _FETCHED.finditer(file.read_text(encoding="utf-8")):
            address = next(filter(None, found.groups()))
            assert not re.match(r"(?:\w+:)?//", address), f"{file.relative_to(site)} fetches {address}"


def the_reference_has_every_option(site: Path) -> None:
    text = shown(site, "reference/commands.html")
    for command in COMMANDS:
        assert f"optimize {command.name}" in text
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert not [option.opts for option in options if option.opts[0] not in text]


def the_reference_has_every_pass_and_target(site: Path) -> None:
    text = shown(site, "reference/passes.html")
    assert not [name for name in registry.passes() if name not in text]
    text = shown(site, "reference/targets.html")
    assert not [name for name, target in registry.targets().items() if name not in text or target.suffix not in text]


def the_reference_has_every_key(site: Path) -> None:
    text = shown(site, "reference/recipe.html")
    assert not [name for name in Recipe.model_fields if name not in text]
    text = shown(site, "reference/report.html")
    assert not [name for record in (Report, Row) for name in record.model_fields if name not in text]


def test_notebooks_are_stored_without_outputs() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = codes(json.loads(path.read_text(encoding="utf-8")))
        assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None], path.name


def codes(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(site: Path, name: str) -> Notebook:
    """Returns a notebook with the outputs that its page shows."""
    path = site.parent / "jupyter_execute" / "notebooks" / name
    return dict(json.loads(path.read_text(encoding="utf-8")))


def printed(notebook: Notebook) -> str:
    """Returns what its cells print, and the text of what they show."""
    outputs = [output for cell in codes(notebook) for output in cell["outputs"]]
    return "".join("".join(output.get("text") or output["data"]["text/plain"]) + "\n" for output in outputs)


def told(notebook: Notebook) -> str:
    """Returns its text, in one line."""
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return " ".join(" ".join(texts).split())


def the_notebooks_ran(site: Path) -> None:
    for path in NOTEBOOKS:
        cells = codes(executed(site, path.name))
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
        kinds = [output.get("name", output["output_type"]) for cell in cells for output in cell["outputs"]]
        assert set(kinds) <= {"stdout", "execute_result"}, f"{path.name} fails or warns"
        page = site / path.relative_to(PAGES).with_suffix(".html")
        assert re.search(rf"href=\"[^\"]*_downloads/[^\"]*{path.name}\"", page.read_text(encoding="utf-8"))


def the_cnn_is_as_good_as_its_notebook_says(site: Path) -> None:
    notebook = executed(site, "cnn.ipynb")
    text, found = told(notebook), printed(notebook)
    assert "Reparameterize: 8 rewrites, 0 left alone" in found
    (least_db,), (most_points,) = re.findall(r"above (\d+) dB", text), re.findall(r"at most (\d+) point", text)
    (level_db,) = re.findall(r"repvgg\.int8\.onnx: ([\d.]+) dB", found)
    kept, before, alone = (float(share) for share in re.findall(r"([\d.]+)%", found))
    assert float(level_db) > float(least_db)
    assert before > 90 and kept >= before - float(most_points)
    assert alone == kept, "the file alone answers otherwise than the report says"
    (shown_report,) = [cell["outputs"] for cell in codes(notebook) if cell["source"][-1:] == ["report"]]
    assert "<iframe" in "".join(shown_report[0]["data"]["text/html"])


def the_lstm_takes_every_length(site: Path) -> None:
    notebook = executed(site, "lengths.ipynb")
    found = printed(notebook)
    levels = re.findall(r"(\w+), (\d+) steps: (\d+) dB", found)
    names = ("onnx", "openvino", "int8")
    assert [level[:2] for level in levels] == [(name, size) for name in names for size in ("50", "333")]
    least_db, of_int8 = map(int, re.findall(r"above (\d+) dB", told(notebook)))
    assert all(int(level_db) > (of_int8 if name == "int8" else least_db) for name, _, level_db in levels)
    assert float(re.findall(r"([\d.]+) times smaller", found)[0]) > 2, "its text says less than half as large"
    of_short, of_long = (re.findall(rf"\({size}, 5\) (.*)", found) for size in (8, 1))
    assert len(of_short) == len(of_long) == 2 and len({*of_short}) == len({*of_long}) == 1, (
        "the runtimes answer differently"
    )
