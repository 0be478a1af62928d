"""The site builds without a warning, asks nothing of other machines, and its reference has what the program has."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import click

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


def build(out: Path) -> Path:
    """Returns the folder of the built site."""
    words = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(out / "doctrees"), str(PAGES), str(out / "html")]
    before = sorted(PAGES.rglob("*"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    built = subprocess.run([sys.executable, "-m", "sphinx", *words], env=environment, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, ""), built.stderr
    assert sorted(PAGES.rglob("*")) == before, "the build left files among the pages"
    return out / "html"


def shown(site: Path, page: str) -> str:
    """Returns the text of a page without its tags."""
    return unescape(re.sub(r"<[^>]+>", "", (site / page).read_text(encoding="utf-8")))


def test_the_site(tmp_path: Path) -> None:
    """Builds it once: several tests would do so once in each process that shares them."""
    site = build(tmp_path)
    every_page_is_there(site)
    nothing_is_fetched_from_elsewhere(site)
    the_reference_has_every_option(site)
    the_reference_has_every_pass_and_target(site)
    the_reference_has_every_key(site)


def every_page_is_there(site: Path) -> None:
    for page in written_pages():
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
