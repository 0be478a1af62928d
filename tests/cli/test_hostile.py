"""Names and texts made to be obeyed: by a terminal, a CI runner, Markdown, a browser, XML. All are only shown."""

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from optimize.cli import cli
from optimize.errors import Refused
from optimize.escaping import plain
from optimize.report import check, console, html, markdown
from optimize.report.document import Document, Item, Items
from tests.gate.records import CASES, RECORD

Typed = Callable[..., subprocess.CompletedProcess[str]]
NAME = "::error::\x1b[2J[red]a[/red][link=b]c\u202e|`<img src=x>![d](www.e)\n::set-output name=f::g%0A\x00\x9b"
#: The same for a file, which takes no NUL and no slash.
FILE = NAME.replace("\x00", "").replace("/", "") + ".pt"


def assert_only_shown(text: str) -> None:
    """Check that a terminal or a runner finds nothing to obey in a text."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert "::error::" not in line and "::set-output" not in line, line


def assert_prose(text: str) -> None:
    """Check that Markdown finds no image, link or HTML in a text but for code spans, where it reads nothing."""
    for line in re.sub(r"(?<!\\)`[^`\n]*`", "", text).split("\n"):
        assert "<img" not in line and "![d]" not in line and "[red]" not in line, line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file with such a name and layers that are named alike."""
    net = nn.Sequential()
    net.add_module("[red]a[link=b]|`<img src=x>", nn.Conv2d(3, 4, 3))
    net.add_module("::error::owned", nn.BatchNorm2d(4))
    path = tmp_path_factory.mktemp("hostile") / FILE
    torch.save(net.eval(), path)
    return path


def test_show(model: Path, tmp_path: Path, typed: Typed) -> None:
    for words in (("--text",), ("--why", "--out", tmp_path / f"{NAME[:20]}.svg")):
        done = typed("show", model, "--input-shape", "3,8,8", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert_only_shown(done.stdout + done.stderr)
    (drawn,) = tmp_path.glob("*.svg")
    ElementTree.parse(drawn)


def test_run(model: Path, tmp_path: Path, typed: Typed) -> None:
    out = tmp_path / "out"
    done = typed(
        "run", model, "--input-shape", "3,8,8", "--fuse", "--to", "torchscript", "--out", out, "--quiet", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "[red]a[red]" in done.stdout and "\\x1b[2J" in done.stdout
    assert_only_shown(done.stdout + done.stderr)
    page = (out / "report.html").read_text(encoding="utf-8")
    written = (out / "report.md").read_text(encoding="utf-8")
    assert_only_shown(written)
    assert_prose(written.split("## Reproduce")[0])
    assert "<img src=x>" not in page and "\x1b" not in page


def test_a_missing_file_and_a_wrong_option_are_told(tmp_path: Path, typed: Typed) -> None:
    for words in (("show", FILE), ("show", f"--{FILE}"), ("compare", FILE, FILE), ("profile", FILE, "--threads", FILE)):
        done = typed(*words, cwd=tmp_path)
        assert done.returncode in (1, 2) and done.stdout == ""
        assert_only_shown(done.stderr)


def test_a_recipe(tmp_path: Path, typed: Typed) -> None:
    recipe = tmp_path / "recipe.yaml"
    for content in ({NAME: 1}, {"passes": [NAME]}, {"targets": [NAME]}, {"threads": NAME}, {"passes": NAME}):
        recipe.write_text(json.dumps(content))
        done = typed("run", "model.pt", "--recipe", recipe, cwd=tmp_path)
        assert done.returncode in (1, 2), done.stderr
        assert_only_shown(done.stderr)


def test_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    named = [entry.model_copy(update={"name": NAME, "reason": NAME, "warnings": (NAME,)}) for entry in CASES]
    found = RECORD.model_copy(update={"cases": tuple(named), "command": NAME, "environment": {"cpu": NAME}})
    told = check.tell_check(found)
    console.show(told)
    assert_only_shown(capsys.readouterr().out)
    text = markdown.render(told, level=check.LEVEL)
    assert_only_shown(text)
    assert_prose(re.sub("<summary>.*</summary>", "", text))
    assert "<img src=x>" not in html.render(told)
    lines = list(check.commands(found))
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r"::(error|warning) title=[^:]*::.*", line) and line.isprintable() and "%0A" not in line
    root = ElementTree.fromstring(check.junit(found))
    for element in root.iter():
        assert all(value.isprintable() for value in element.attrib.values())
        assert_only_shown(element.text or "")


def test_markdown_shows_what_it_would_read() -> None:
    assert markdown.escape("# [a](b) ![c](d) <e> |f| www.g") == r"\# \[a\](b) !\[c\](d) &lt;e&gt; \|f\| www\.g"
    assert markdown.fence("```\n```") == "````\n```\n```\n````"
    assert "\n" not in markdown.code(NAME)


def test_nobody_is_called_and_nothing_is_a_formula() -> None:
    """GitHub makes formulas, mentions and references of what stands in a text, and of nothing in two elements."""
    calling = "#1 @everyone $x$ a/b#2"
    silent = re.sub("([@$]|#(?=[0-9]))", r"<span>\1</span>", calling)
    assert markdown.escape(calling) == silent
    folded = Items((Item(calling, "fine", lines=("found",)),), title="", fold="what was measured")
    assert f"<summary>{silent}: what was measured" in markdown.render(Document("t", "", (folded,)))


@pytest.mark.parametrize("sign", "\u202e\u200b\u2066\ufeff\u034f\u115f\u2800\u3164\ufe0f\uffa0\U000e0041\U000e0100")
def test_what_is_not_seen_is_written_out(sign: str) -> None:
    written = sign.encode("unicode_escape").decode("ascii")
    assert plain(f"a{sign}b") == f"a{written}b" and markdown.code(f"a{sign}b") == f"`a{written}b`"
    assert plain("préfixe 模型 नमूना") == "préfixe 模型 नमूना"


@pytest.mark.parametrize("name", ["run", "bench", "sensitivity"])
def test_a_link_that_nobody_named_is_not_written_through(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloned repository may hold one where results go."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pt").touch()
    place = {"run": "optimized"}.get(name, name)
    (tmp_path / place).symlink_to("elsewhere")
    words = [name, "net.pt", *(["net.pt"] if name == "bench" else [])]
    found = CliRunner().invoke(cli, words).exception
    assert isinstance(found, Refused) and f"'{place}' is a link to 'elsewhere', and nobody named it" in found.what
    found = CliRunner().invoke(cli, [*words, "--out", place]).exception
    assert "link" not in str(found) and not (tmp_path / "elsewhere").exists()
